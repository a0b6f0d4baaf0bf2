"""What the form of an answer is held to: one constraint, in whichever of the spellings that servers
have for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Field

from localllm.errors import RequestError
from localllm.server.dialects.known import FORMS, BodyPart, Refused, Shape

# ("json_schema" | "gbnf" | "regex", source), as `engine.messages.Request.grammar` takes it, or
# ("loose_schema", source): a schema of which the rest holds where a part can't.
Constraint: TypeAlias = tuple[str, str]


def only_one(**named: Constraint | None) -> Constraint | None:
    """The one constraint that is given; raises RequestError if there are several, by their field
    names."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        names = list(given)
        raise RequestError(f"{' and '.join(names)} can't be combined: send one", param=names[1])
    return next(iter(given.values()), None)


def of_schema(
    schema: Mapping[str, Any] | str | None, where: str = "json_schema", *, strict: bool = True
) -> Constraint | None:
    """The constraint of a JSON schema, or of one as text. Raises RequestError for text that is
    none."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{where} is no JSON", param=where) from e
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{where} must be a JSON schema", param=where)
    if schema is None:
        return None
    return ("json_schema" if strict else "loose_schema", json.dumps(schema))


def of_choice(texts: Sequence[str] | None, where: str) -> Constraint | None:
    """The constraint of an answer that is one of `texts`. Raises RequestError."""
    if texts is None:
        return None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{where} must be texts, one at least", param=where)
    return "regex", "|".join(map(re.escape, texts))


def of_response_format(response_format: Any, where: str = "response_format") -> Constraint | None:
    """The engine's constraint for OpenAI's `response_format`, which a client calls `where`; raises
    RequestError."""
    if isinstance(response_format, Mapping):
        form = response_format
    else:
        form = {}
    kind = form.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's spelling puts a schema beside json_object.
        schema = form.get("schema")
        return of_schema(schema if isinstance(schema, dict) else {"type": "object"})
    if kind != "json_schema":
        raise RequestError(f"{where} must be an object with a type: {FORMS.reason}", param=where)
    wrapped = form.get("json_schema")
    said = wrapped if isinstance(wrapped, Mapping) else form
    schema = said.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"the schema of {where} must be an object", param=where)
    return of_schema(schema, strict=said.get("strict") is not False)


class StructuredFields(BodyPart):
    """vLLM's `structured_outputs`."""

    model_config = ConfigDict(protected_namespaces=())
    shapes: ClassVar[Shape] = {
        "structural_tag": Refused("not implemented; send `tools` or a grammar"),
    }
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=1 << 16)
    choice: Annotated[list[str], Field(max_length=4096)] | None = None
    grammar: str | None = Field(None, max_length=1 << 18)
    json_object: bool | None = None

    def constraint(self) -> Constraint | None:
        return only_one(
            json=of_schema(self.json_, "structured_outputs.json"),
            regex=("regex", self.regex) if self.regex else None,
            choice=of_choice(self.choice, "structured_outputs.choice"),
            grammar=("gbnf", self.grammar) if self.grammar else None,
            json_object=of_schema({"type": "object"}) if self.json_object else None,
        )
