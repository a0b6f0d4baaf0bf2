"""POST /models/load and /models/unload: what a client may send."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from localllm.server.dialects.fields import Body


class ModelFields(Body):
    """POST /models/load and /models/unload."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
