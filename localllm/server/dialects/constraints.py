"""Constraints on the form of an answer. A request may have one, under any of the names that servers
use for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Field

from localllm.errors import RequestError, UnsupportedError
from localllm.grammars.closed_objects import with_closed_objects
from localllm.grammars.json_schema import convert_schema
from localllm.json_limits import TooManyContainersError, TooManyValuesError, check_counts
from localllm.server.dialects.known import FORMS, BodyPart, Refused, Shape

# ("json_schema" | "gbnf" | "regex", source), as `engine.messages.Request.grammar` takes it, or
# ("loose_schema", source). Parts of a loose schema that can't be enforced are ignored, and the rest
# applies.
Constraint: TypeAlias = tuple[str, str]
# Types of the constraints in a body.
SchemaSource: TypeAlias = dict[str, Any] | str
RegexSource = Annotated[str, Field(max_length=1 << 16)]
_MAX_CHARS = 1 << 18
GrammarSource = Annotated[str, Field(max_length=_MAX_CHARS)]
ChoiceTexts = Annotated[list[str], Field(max_length=4096)]


def only_one(**named: Constraint | None) -> Constraint | None:
    """Return the constraint that was sent, or None. The keywords are the field names. Raises
    RequestError if there are several."""
    sent_fields = {name: value for name, value in named.items() if value is not None}
    if len(sent_fields) > 1:
        names = list(sent_fields)
        raise RequestError(f"{' and '.join(names)} can't be combined: send one", param=names[1])
    return next(iter(sent_fields.values()), None)


def of_schema(
    schema: Mapping[str, Any] | str | bool | None,
    where: str = "json_schema",
    *,
    strict: bool = True,
) -> Constraint | None:
    """Return the constraint for a JSON schema, which may be sent as text. Its objects are closed.
    Raises RequestError if the text is not a JSON schema."""
    if isinstance(schema, str):
        try:
            check_counts(schema.encode(errors="replace"))
            schema = json.loads(schema)
        except (TooManyContainersError, TooManyValuesError) as e:
            raise RequestError(f"{where} holds {e}", param=where) from e
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{where} is not valid JSON", param=where) from e
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{where} must be a JSON schema", param=where)
    if schema is None:
        return None
    if not strict:
        return "loose_schema", json.dumps(schema)
    text = json.dumps(with_closed_objects(schema))
    try:
        convert_schema(json.loads(text))  # also for an answer of no tokens
    except UnsupportedError as e:
        e.param = e.param or where
        raise
    return "json_schema", text


def of_object(wanted: bool | None) -> Constraint | None:
    """Return the constraint for any JSON object if it is wanted, else None."""
    return of_schema({"type": "object"}) if wanted else None


def of_regex(pattern: str | None) -> Constraint | None:
    """Return the constraint for a regular expression, or None if it is empty."""
    return ("regex", pattern) if pattern else None


def of_grammar(source: str | None) -> Constraint | None:
    """Return the constraint for a GBNF grammar, or None if it is empty."""
    return ("gbnf", source) if source else None


def of_choice(texts: Sequence[str] | None, where: str) -> Constraint | None:
    """Return the constraint for an answer that is one of `texts`. Raises RequestError."""
    if texts is None:
        return None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{where} must be a list of at least one text", param=where)
    n_chars = sum(map(len, texts))
    if n_chars > _MAX_CHARS:
        raise RequestError(
            f"the texts of {where} have {n_chars:,} characters together; the limit is "
            f"{_MAX_CHARS:,}",
            param=where,
        )
    return "regex", "|".join(map(re.escape, texts))


def of_response_format(response_format: Any, where: str = "response_format") -> Constraint | None:
    """Return the constraint for OpenAI's `response_format`. `where` is the field's name in errors.
    Raises RequestError."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's variant has the schema next to the type.
        schema = response_format.get("schema")
        if schema is None:
            return of_object(True)
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"the schema of {where} must be an object", param=where)
        return of_schema(schema, where)
    if kind != "json_schema":
        raise RequestError(f"{where} must be an object with a type: {FORMS.reason}", param=where)
    described = response_format.get("json_schema")
    if not isinstance(described, Mapping):
        described = response_format
    schema = described.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"the schema of {where} must be an object", param=where)
    return of_schema(schema, where, strict=described.get("strict") is not False)


class StructuredFields(BodyPart):
    """vLLM's `structured_outputs`."""

    model_config = ConfigDict(protected_namespaces=())
    shapes: ClassVar[Shape] = {
        "structural_tag": Refused("not implemented; send `tools` or a grammar"),
    }
    json_: SchemaSource | None = Field(None, alias="json")
    regex: RegexSource | None = None
    choice: ChoiceTexts | None = None
    grammar: GrammarSource | None = None
    json_object: bool | None = None

    def constraint(self) -> Constraint | None:
        return only_one(
            json=of_schema(self.json_, "structured_outputs.json"),
            regex=of_regex(self.regex),
            choice=of_choice(self.choice, "structured_outputs.choice"),
            grammar=of_grammar(self.grammar),
            json_object=of_object(self.json_object),
        )
