"""Memoised by object identity: models and devices hold dicts, so they have no hash."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")
_First = TypeVar("_First")
_Second = TypeVar("_Second")
_KEEP = 1024
# Pairs: every variant of the catalog with its model, and then some.
_KEEP_PAIRS = 4096


def by_identity(ask: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """`ask` of (object, further hashable arguments), asked once for each object; for what never
    changes once made.

    The object is kept alive beside its answer, so that no other can have its identity.
    """
    known: dict[object, tuple[object, _Answer]] = {}

    @wraps(ask)
    def remembered(*args: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        of = args[0]
        key: object = (id(of), *args[1:], *named.values()) if named or len(args) > 1 else id(of)
        found = known.get(key)
        if found is not None and found[0] is of:
            return found[1]
        if len(known) >= _KEEP:
            known.clear()
        answer = ask(*args, **named)
        known[key] = (of, answer)
        return answer

    return remembered


def by_identities(
    ask: Callable[[_First, _Second], _Answer],
) -> Callable[[_First, _Second], _Answer]:
    """The same for what is asked of two objects. Apart from `by_identity`, since plans ask it
    thousands of times."""
    known: dict[tuple[int, int], tuple[_First, _Second, _Answer]] = {}

    @wraps(ask)
    def remembered(first: _First, second: _Second) -> _Answer:
        key = id(first), id(second)
        found = known.get(key)
        if found is not None and found[0] is first and found[1] is second:
            return found[2]
        if len(known) >= _KEEP_PAIRS:
            known.clear()
        answer = ask(first, second)
        known[key] = first, second, answer
        return answer

    return remembered
