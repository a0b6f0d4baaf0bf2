"""Answers about one object kept by its identity: models and devices hold dicts, so they have no hash to keep them by."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")
_KEEP = 1024


def by_identity(ask: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """`ask` of (object, further hashable arguments), asked once for each object; for what never changes once made.

    The object is kept alive beside its answer, so that no other can have its identity.
    """
    known: dict[tuple[object, ...], tuple[object, _Answer]] = {}

    @wraps(ask)
    def remembered(*args: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        of = args[0]
        key = (id(of), *args[1:], *named.values())
        found = known.get(key)
        if found is not None and found[0] is of:
            return found[1]
        if len(known) >= _KEEP:
            known.clear()
        answer = ask(*args, **named)
        known[key] = (of, answer)
        return answer

    return remembered
