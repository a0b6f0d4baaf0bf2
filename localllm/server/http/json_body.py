"""Bytes to a JSON object that can't hurt: bounded depth, finite numbers, valid Unicode."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from localllm.errors import RequestError

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJsonError(RequestError):
    """The body is not JSON, or not a JSON object."""

    code = "invalid_json"


def parse(body: bytes, max_depth: int = 96) -> dict[str, Any]:
    """The JSON object in `body`; raises BadJsonError. Lone surrogates (editors cut text in mid-character) become
    U+FFFD, so that everything that comes out can be written as UTF-8."""
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(body, max_depth)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except UnicodeDecodeError as e:
        raise BadJsonError(f"the body is not UTF-8 text: byte {e.start} is invalid") from e
    except json.JSONDecodeError as e:
        raise BadJsonError(f"the body is not JSON: {e.msg} at line {e.lineno} column {e.colno}") from e
    except (ValueError, RecursionError) as e:
        raise BadJsonError("the body is not JSON this server can read: a number is too long or nesting too deep") from e
    if not isinstance(value, dict):
        raise BadJsonError("the body must be a JSON object")
    if b"\\ud" in body or b"\\uD" in body or b"\xed" in body:
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _check_depth(body: bytes, max_depth: int) -> None:
    depth = 0
    for match in _STRUCTURE.finditer(body):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > max_depth:
                raise BadJsonError(f"the body nests deeper than {max_depth} levels")
        elif token in (b"]", b"}"):
            depth -= 1


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if _SURROGATE.search(value) else value
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadJsonError(f"the body is not JSON: {name} is not a JSON number")
