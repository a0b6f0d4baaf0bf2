"""POST /tokenize and /detokenize: what a client may send."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from localllm.server.dialects.fields import Body


class TokenizeFields(Body):
    """POST /tokenize."""

    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(Body):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(default_factory=list)
