"""`dataclass`, as in the standard library, but defined six times as fast.

A start defines some 400 of these classes. The standard library compiles up to nine methods for
each of them, which takes 0.2 s of a start. Here the class has closures instead, and `__init__` is
compiled by the first call. `dataclasses.fields`, `replace` and `asdict` work as usual. A class that
inherits fields is made by the standard library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")
Fields = Sequence["Field[Any]"]
# The default of a parameter whose field has a factory.
_MADE = object()

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type[T] | None = None,
        /,
        *,
        eq: bool = True,
        frozen: bool = False,
        kw_only: bool = False,
        slots: bool = False,
    ) -> type[T] | Callable[[type[T]], type[T]]:
        """Make a dataclass, with the standard library's options of these names."""

        def made(plain: type[T]) -> type[T]:
            return _made(plain, eq=eq, frozen=frozen, kw_only=kw_only, slots=slots)

        return made if cls is None else made(cls)


def _made(plain: type[T], *, eq: bool, frozen: bool, kw_only: bool, slots: bool) -> type[T]:
    if any(hasattr(base, "__dataclass_fields__") for base in plain.__mro__[1:]):
        options = {"eq": eq, "frozen": frozen, "kw_only": kw_only, "slots": slots}
        return dataclasses.dataclass(**options)(plain)
    own = dict(vars(plain))
    # The standard library describes the parameters of a class without a docstring, which is slow.
    plain.__doc__ = plain.__doc__ or f"{plain.__name__}(...)"
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)(
        plain
    )
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    methods: dict[str, Any] = {
        "__init__": _first_init(cls, fields, frozen=frozen),
        "__repr__": _repr,
    }
    if eq:
        methods["__eq__"] = _eq(_values(f.name for f in fields if f.compare))
        methods["__hash__"] = None
        if frozen:
            hashed = (f.name for f in fields if (f.compare if f.hash is None else f.hash))
            methods["__hash__"] = _hash(_values(hashed))
    if frozen:
        methods |= _frozen(cls, fields)
        if slots:
            methods |= _pickled(fields)
    # The standard library compares these if the class is inherited.
    params: Any = vars(cls)["__dataclass_params__"]
    params.frozen = frozen
    params.eq = eq
    # Python itself sets __hash__ to None next to an own __eq__.
    if own.get("__hash__") is None:
        own.pop("__hash__", None)
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


def _values(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that returns the values of these fields."""
    found = list(names)
    if len(found) > 1:
        return attrgetter(*found)
    return lambda self: tuple(getattr(self, name) for name in found)


def _eq(values: Callable[[Any], Any]) -> Callable[[Any, object], Any]:
    def equal(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    return equal


def _hash(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    def hashed(self: Any) -> int:
        return hash(values(self))

    return hashed


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _frozen(cls: type, fields: Fields) -> dict[str, Any]:
    names = frozenset(f.name for f in fields)

    def assign(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    return {"__setattr__": assign, "__delattr__": delete}


def _pickled(fields: Fields) -> dict[str, Any]:
    """Return the methods that pickle and copy a frozen class with slots."""
    names = [f.name for f in fields]

    def state_of(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def restore(self: Any, state: list[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {"__getstate__": state_of, "__setstate__": restore}


def _first_init(cls: type, fields: Fields, *, frozen: bool) -> Callable[..., None]:
    """Return an `__init__` that compiles the one of these fields, and calls it."""

    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        compiled = _init(cls, fields, frozen=frozen)
        cls.__init__ = compiled  # type: ignore[misc]
        compiled(self, *args, **kwargs)

    return first


def _init(cls: type, fields: Fields, *, frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"_made": _MADE, "_set": object.__setattr__}
    positional: list[str] = []
    by_name: list[str] = []
    body: list[str] = []
    for f in fields:
        value = f.name
        parameter = f.name
        if f.default_factory is not MISSING:
            scope[f"_new_{f.name}"] = f.default_factory
            parameter = f"{f.name}=_made"
            value = f"_new_{f.name}() if {f.name} is _made else {f.name}"
            if not f.init:
                value = f"_new_{f.name}()"
        elif f.default is not MISSING:
            scope[f"_default_{f.name}"] = f.default
            parameter = f"{f.name}=_default_{f.name}"
            if not f.init:
                value = f"_default_{f.name}"
        elif not f.init:
            continue
        assign = f"_set(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}"
        body.append(f"    {assign}")
        if f.init:
            (by_name if f.kw_only else positional).append(parameter)
    if hasattr(cls, "__post_init__"):
        body.append("    self.__post_init__()")
    if by_name:
        by_name.insert(0, "*")
    parameters = ", ".join(["self", *positional, *by_name])
    exec(f"def __init__({parameters}):\n" + "\n".join(body or ["    pass"]), scope)
    compiled: Callable[..., None] = scope["__init__"]
    compiled.__qualname__ = f"{cls.__qualname__}.__init__"
    return compiled
