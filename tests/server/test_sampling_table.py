"""Sampling parameters are defined once.

Every parameter of the engine's dataclass is a field of every generating body, with its range.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from localllm.engine.messages import FieldRange, Sampling
from localllm.errors import RequestError
from localllm.server.dialects.anthropic.messages import MessagesFields
from localllm.server.dialects.fields import GenerationFields, SamplingFields
from localllm.server.dialects.known import read
from localllm.server.dialects.llamacpp.completion import LlamaCppFields
from localllm.server.dialects.ollama.requests import Options
from localllm.server.dialects.openai.chat import ChatFields
from localllm.server.dialects.openai.completions import CompletionFields
from localllm.server.dialects.responses.items import ResponsesFields

BODIES = (ChatFields, CompletionFields, ResponsesFields, MessagesFields, LlamaCppFields, Options)
HINTS = get_type_hints(Sampling, include_extras=True)
NUMBERS = {
    name: kind.__metadata__[0]
    for name, kind in HINTS.items()
    if name != "logit_bias" and hasattr(kind, "__metadata__")
}


@pytest.mark.parametrize("body", BODIES)
def test_every_parameter_is_a_field_of_every_generating_body(body: type[BaseModel]) -> None:
    wanted = {f.name for f in fields(Sampling)}
    # Ollama's options have no token ids.
    assert wanted - set(body.model_fields) <= ({"logit_bias"} if body is Options else set())


@pytest.mark.parametrize(("name", "limits"), NUMBERS.items())
def test_a_sampling_value_is_checked_by_range_and_reaches_the_engine(
    name: str, limits: FieldRange
) -> None:
    for value in (limits.least - 1, limits.most + 1, *([limits.least] if limits.above else [])):
        with pytest.raises(RequestError, match=name):
            read(SamplingFields, {name: value})
    sent: Any = limits.most
    taken, _ = read(SamplingFields, {name: sent})
    assert isinstance(taken, GenerationFields)
    made = taken.generation(Sampling())
    assert getattr(made.sampling, name) == (sent & (2**63 - 1) if name == "seed" else sent)
