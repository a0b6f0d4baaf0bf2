"""Loosens JSON schemas (json_schema.py) within limits of time and memory.

Checking a schema can take minutes, because llguidance's work grows with the square of some schemas'
size. So a long schema is checked in a `LimitedChild`, which runs this module."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from localllm.errors import BusyError, UnsupportedError
from localllm.grammars import json_schema
from localllm.grammars.deep_stack import check_parts
from localllm.limited_child import (
    ChildError,
    ChildLimits,
    LimitedChild,
    OverLimitError,
    RefusedError,
    serve,
)

# Shorter schemas are checked in this process, where a check takes milliseconds.
SHORT_CHARS = 4096
_LIMITS = ChildLimits(cpu_s=1.0, memory_bytes=96 * 2**20)
# Longest wait for the child, which checks one schema at a time, and for its answer.
MAX_WAIT_S = 1.0
_MAX_ELAPSED_S = 5.0
# Longer schemas are not cached.
_CACHED_CHARS = 2**17
_HINT = "send a smaller one, or ask for JSON without a schema"
CHILD = LimitedChild("localllm.grammars.loosening", _LIMITS)
_CHILD_LOCK = threading.Lock()


def loosened(schema: Any) -> tuple[json_schema.Schema, tuple[str, ...]]:
    """`schema` without the parts that llguidance can't enforce, and the affected keywords.

    Raises UnsupportedError if that is too much work, and BusyError.
    """
    try:
        text = json.dumps(schema)
    except (RecursionError, ValueError):
        return True, ("schema",)
    if len(text) <= SHORT_CHARS:
        return json_schema.loosened(schema)
    check_parts(text)
    if len(text) <= _CACHED_CHARS:
        return _loosened_cached(text)
    return _loosened_by_child(text)


def enforceable(grammar: tuple[str, str] | None) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """A constraint in the engine's form, and the keywords that can't be enforced.

    Only a `loose_schema` is changed: its unsupported keywords are dropped. Raises UnsupportedError
    if it has too many parts or is too much work, and BusyError.
    """
    if grammar is not None and grammar[0] == "json_schema":
        return grammar, json_schema.without_effect(grammar[1])
    if grammar is None or grammar[0] != "loose_schema":
        return grammar, ()
    check_parts(grammar[1])
    schema, words = loosened(json.loads(grammar[1]))
    return ("json_schema", json.dumps(schema)), words


def _loosened_by_child(text: str) -> tuple[json_schema.Schema, tuple[str, ...]]:
    deadline_s = time.monotonic() + _MAX_ELAPSED_S
    if not _CHILD_LOCK.acquire(timeout=MAX_WAIT_S):
        raise BusyError("another request's large schema is being checked", retry_after_s=1.0)
    try:
        schema, words = CHILD.ask(text, wanted=lambda: time.monotonic() < deadline_s)
    except OverLimitError as e:
        raise UnsupportedError(f"the schema can't be checked: {e}", hint=_HINT) from e
    except RefusedError as e:
        raise UnsupportedError(str(e), hint=_HINT) from e
    except ChildError as e:
        raise BusyError(f"the schema could not be checked: {e}") from e
    finally:
        _CHILD_LOCK.release()
    return schema, tuple(words)


_loosened_cached = lru_cache(maxsize=32)(_loosened_by_child)


def _make_check(_setup: Any) -> Callable[[str], Any]:
    json_schema.loosened({"type": "object", "properties": {"a": {"type": "string"}}})

    def check(text: str) -> Any:
        return json_schema.loosened(json.loads(text))

    return check


if __name__ == "__main__":
    serve(_make_check)
