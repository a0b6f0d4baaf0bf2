"""Validates request bodies for all dialects. One function handles every field at every depth.
Error messages use this server's own words.

A shape describes the fields of an object. Its key READS holds a function that decides by an
object's `type` whether the object is read at all. The other keys are field names, with these
values:
- None: the field is accepted. Its content is not checked here.
- A shape: the field holds an object or a list of objects.
- `Refused`: the request is refused with a reason. `one_of` refuses all but a few values.
- `Unused`: the field is known but has no effect. The response names it, unless its value asks for
  the default behaviour.
Unknown fields are named in the response as well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from localllm.errors import RequestError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Unused:
    """A field without effect. `off`: values that ask for the default behaviour. If there is a
    `reason`, any other value is refused."""

    reason: str = ""
    off: tuple[Any, ...] = (None, False)


@dataclass(frozen=True, slots=True)
class Refused(Unused):
    """A known field that can't be honoured, and the values that mean "off"."""

    off: tuple[Any, ...] = (None,)


def one_of(*known: str) -> Refused:
    """Return the description of a field that accepts only these values, such as an object's
    `type`."""
    return Refused(f"it must be one of {', '.join(known)}", (None, *known))


def indifferent(*known: str) -> Unused:
    """Return the description of a field whose values change nothing here. The response names it if
    its value is not one of `known`."""
    return Unused(off=(None, *known))


Shape: TypeAlias = Mapping[str, Any]
_UNKNOWN = Unused(off=())
# Key in a shape. Its value is a function of an object's `type` that returns whether the object is
# read. If it is not read, its fields are skipped here, and other code reports the object.
READS = ""


def _refused() -> dict[str, Refused]:
    """Return the fields that every body refuses, unless its model declares a field of that name.

    `off`: values that ask for the default behaviour, as null does. Sources: OpenAI's API reference;
    llama.cpp tools/server/README.md; vLLM's OpenAI-compatible server."""
    # JSON, because a TOML parser would delay each start of the server.
    table = Path(__file__).with_name("refused.json").read_text(encoding="utf-8")
    refused = {}
    for name, field in json.loads(table).items():
        refused[name] = Refused(field["reason"], (None, *field["off"]))
    return refused


REFUSED: Mapping[str, Refused] = _refused()
# Fields that do not change the answer, such as billing or the slot.
HINTS = ("model", "stream", "user", "metadata", "safety_identifier", "id_slot")
_COMMON: Shape = {
    **REFUSED,
    **dict.fromkeys(HINTS),
    "prompt_cache_retention": indifferent("in_memory", "in-memory", "24h"),
    "store": Unused(),
    "verbosity": Unused(off=(None, "medium")),
}


class BodyPart(BaseModel):
    """Base class of request bodies and their parts. Pydantic builds the validator at first use or
    in `openapi.build_bodies`. Building all of them takes longer than loading a small model."""

    model_config = ConfigDict(defer_build=True)


def shape(*names: str, **inner: Any) -> dict[str, Any]:
    """Return a shape. `names` are fields that have an effect; `inner` are fields with their own
    shapes."""
    return {**dict.fromkeys(names), **inner}


def unused(sent: Any, known: Shape | None, path: str = "", spot: str = "") -> Iterator[str]:
    """Yield the paths of the fields in `sent` that have no effect. Raises UnsupportedError for a
    refused field.

    `spot` is the path with list indices, for errors."""
    if known is None:
        return
    if isinstance(sent, list):
        for i, item in enumerate(sent):
            if isinstance(item, dict | list):  # skips numbers, which may be a million
                yield from unused(item, known, path, f"{spot}[{i}]")
    elif isinstance(sent, Mapping) and _is_read(sent, known):
        for name, value in sent.items():
            where = _below(path, name)
            place = _below(spot, name)
            fate = _UNKNOWN if name == READS else known.get(name, _UNKNOWN)
            if not isinstance(fate, Unused):
                yield from unused(value, fate, where, place)
            elif value not in fate.off:
                if fate.reason:
                    problem = f"{place} {str(value)[:40]!r} is not supported: {fate.reason}"
                    problem += _alternatives(fate)
                    raise UnsupportedError(problem, param=place)
                yield where


def _alternatives(fate: Unused) -> str:
    """Return the values that a refused field may have, if the reason does not list them."""
    texts = [value for value in fate.off if isinstance(value, str) and value]
    if not texts or all(text in fate.reason for text in texts):
        return ""
    return f" (it may be {' or '.join(texts)})"


def _is_read(sent: Mapping[str, Any], known: Shape) -> bool:
    """Return whether the object is read at all, by its type."""
    reads = known.get(READS)
    return reads is None or bool(reads(sent.get("type")))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@cache
def shape_of(kind: type[BaseModel]) -> Shape:
    """Return the shape of the body that `kind` reads.

    It contains the fields of `kind` and the fields of the objects in them. `kind.shapes` adds
    shapes of objects that are passed on unchanged, and of fields that are not read."""
    own = {
        field.alias or name: _inner(field.annotation) for name, field in kind.model_fields.items()
    }
    shapes = getattr(kind, "shapes", {})
    more = {n: s for n, s in shapes.items() if n in own or not isinstance(s, Mapping)}
    if "stream" in own:
        return {**_COMMON, **own, **more}
    return {**own, **more}


def _inner(annotation: Any) -> Shape | None:
    """Return the shape of the objects that a field of this type may hold, including objects in
    lists and unions. The result is None for fields without objects."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return shape_of(annotation)
    found: dict[str, Any] = {}
    for part in get_args(annotation):
        found |= _inner(part) or {}
    return found or None


Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body], body: Mapping[str, Any]) -> tuple[Body, list[str]]:
    """Validate `body` as `kind`. Return the validated body and the names of ignored fields. Raises
    RequestError or UnsupportedError."""
    ignored = sorted(set(unused(body, shape_of(kind))))
    try:
        return kind.model_validate(body), ignored
    except ValidationError as e:
        raise _invalid(e, body) from e


# Expected types by pydantic's error types. Pydantic's own messages use Python's type names.
_TYPES_WANTED = {
    "none_required": "null",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
}
_OTHER_PROBLEMS = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of this object",
    "too_short": "has {actual_length} entries; {min_length} is the minimum",
    "too_long": "has more than {max_length} entries",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters or fewer",
    "union_tag_invalid": "must have a type: {expected_tags}",
    "union_tag_not_found": "must have a type",
}


def problem_of(errors: Iterable[Any]) -> str:
    """Return the problem of one value, from pydantic's errors: the first error that does not
    concern the type, or all types that a union accepts."""
    wanted = []
    for error in errors:
        kind = error["type"]
        values = error.get("ctx", {})
        if kind in _TYPES_WANTED:
            wanted.append(_TYPES_WANTED[kind].format(**values))
        else:
            return _OTHER_PROBLEMS.get(kind, "has a value that is not allowed").format(**values)
    return f"must be {' or '.join(dict.fromkeys(wanted))}"


def _invalid(found: ValidationError, body: Any) -> RequestError:
    """Return the error for `body`. For a union, only the errors of the members that matched deepest
    count."""
    errors = found.errors(include_url=False, include_input=False)
    of_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    path = max((_sent_path(error, body) for error in of_field), key=len)
    problem = problem_of(error for error in of_field if _sent_path(error, body) == path)
    where = ".".join(path)
    return RequestError(f"{where or 'body'}: {problem}", param=where or None)


def _sent_path(error: Any, body: Any) -> list[str]:
    """Return the path of pydantic's `error` in the body. Pydantic's own path also contains the
    types of union members, which the client did not send."""
    path = []
    for step in error["loc"]:
        if isinstance(body, Mapping):
            there = step in body
        else:
            there = isinstance(body, list) and step in range(len(body))
        if there:
            body = body[step]
        if there or (error["type"] == "missing" and step is error["loc"][-1]):
            path.append(str(step))
    return path


# --- parts of messages and tools that several dialects share --------------------------------------

# Image detail: images are read at their own size.
_DETAIL = Unused(off=(None, "auto", "original"))
CACHE_CONTROL = shape(type=indifferent("ephemeral"), ttl=indifferent("5m", "1h"))
PART = shape(
    "type", "text", "refusal", "thinking", "signature", "data", "input_audio", "audio_url", "video_url",
    "file_data", "file_url", "file_id", "filename", "annotations", "logprobs", "image", "url",
    cache_control=CACHE_CONTROL,
    detail=_DETAIL,
    image_url=shape("url", detail=_DETAIL),
    file=shape("file_data", "file_id", "filename", "file_url"),
)  # fmt: skip
_CALL = shape("name", "arguments", "index")
MESSAGE = shape(
    "role", "name", "tool_call_id", "tool_name", "reasoning_content", "reasoning", "thinking",
    "images",
    content=PART,
    tool_calls=shape("id", "type", "index", function=_CALL, custom=shape("name", "input")),
    function_call=_CALL,
    annotations=Unused(off=(None, [])),
    refusal=Unused(off=(None,)),
    audio=Unused(off=(None,)),
)  # fmt: skip
_SYNTAX = shape("definition", syntax=one_of("lark", "regex"))
_GRAMMAR = shape(type=one_of("text", "grammar"), **_SYNTAX, grammar=_SYNTAX)
TOOL: dict[str, Any] = shape(
    "type", "name", "description", "parameters", "strict",
    cache_control=CACHE_CONTROL,
    format=_GRAMMAR,
    function=shape("name", "description", "parameters", "strict"),
    custom=shape("name", "description", format=_GRAMMAR),
)  # fmt: skip
TOOL["tools"] = TOOL  # the tools of a namespace
TOOL[READS] = (None, "function", "custom", "namespace").__contains__
_CALLED = ("function", "custom")
_NAMED = shape(
    "name", "namespace", type=one_of(*_CALLED), function=shape("name"), custom=shape("name")
)
_ALLOWED = shape(mode=one_of("auto", "required"), tools=_NAMED)
CHOICE: dict[str, Any] = {**_NAMED, **_ALLOWED, "allowed_tools": _ALLOWED}
CHOICE["type"] = one_of(*_CALLED, "allowed_tools", "auto", "none", "required", "any")
_DESCRIBED = shape("name", "schema", "strict", description=Unused(off=(None, "")))
FORMS = one_of("text", "json_object", "json_schema")
FORM = shape(type=FORMS, **_DESCRIBED, json_schema=_DESCRIBED)
STREAMED = shape("include_usage", include_obfuscation=Unused(), continuous_usage_stats=Unused())
