"""`localllm_records.dataclass` makes the same classes as the standard library's decorator."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from localllm_records import dataclass

NOT_A_NUMBER = float("nan")
Decorator = Callable[..., Any]
OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"slots": True},
    {"eq": False},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "eq": False},
    {"frozen": True, "slots": True, "kw_only": True},
)


def example(decorator: Decorator, options: dict[str, bool]) -> Any:
    class Value:
        """A value."""

        name: str = "a"
        parts: list[int] = field(default_factory=list)
        secret: str = field(default="s", repr=False)
        seen: int = field(default=0, compare=False)
        doubled: str = field(default="", init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "doubled", 2 * self.name)

    return decorator(**options)(Value)


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


@dataclass(frozen=True, slots=True)
class Named(Point):
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign(Point):
    """A class of other code, which knows the standard library alone."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class ByIdentity:
    x: float
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Open:
    x: int


class Child(Open):
    """A subclass that is no dataclass may hold more."""


@dataclass
class Node:
    children: list[Node]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_are_equal_to_the_standard_librarys(options: dict[str, bool]) -> None:
    ours = example(dataclass, options)
    theirs = example(dataclasses.dataclass, options)
    assert repr(ours(name="b")) == repr(theirs(name="b"))
    assert dataclasses.asdict(ours(name="b")) == dataclasses.asdict(theirs(name="b"))
    assert [f.name for f in dataclasses.fields(ours)] == [
        f.name for f in dataclasses.fields(theirs)
    ]
    assert (ours(name="b") == ours(name="b")) == (theirs(name="b") == theirs(name="b"))
    assert (ours(seen=1) == ours(seen=2)) == (theirs(seen=1) == theirs(seen=2))
    assert ours() != theirs()
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    assert hasattr(ours(), "__dict__") == hasattr(theirs(), "__dict__")
    assert ours.__match_args__ == theirs.__match_args__
    assert ours.__doc__ == theirs.__doc__
    assert ours().parts is not ours().parts


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_wrong_calls_fail_alike(options: dict[str, bool]) -> None:
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        (("a", [], "s", 0, "d"), {}),
        ((), {"doubled": "d"}),
        ((), {"nosuch": 1}),
    )
    for args, named in calls:
        said = []
        for decorator in (dataclass, dataclasses.dataclass):
            with pytest.raises(TypeError) as error:
                example(decorator, options)(*args, **named)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_a_parameter_without_a_default_is_required() -> None:
    with pytest.raises(TypeError, match=r"Point.__init__\(\) missing 1 required .*'x'"):
        Point()  # type: ignore[call-arg]


def test_frozen_values_do_not_change() -> None:
    for value in (Point(1), Open(1)):
        with pytest.raises(FrozenInstanceError):
            value.x = 2  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del value.x
    child = Child(1)
    child.more = 3  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        child.x = 2  # type: ignore[misc]


def test_equal_values_are_one_key() -> None:
    assert {Point(1): "p"}[Point(1, 2)] == "p"
    assert Point(1) != Named(1)
    assert len({ByIdentity(1), ByIdentity(1)}) == 2
    assert ByIdentity(1) == ByIdentity(1)
    # As in a tuple: the same object is equal to itself.
    assert ByIdentity(NOT_A_NUMBER) == ByIdentity(NOT_A_NUMBER)


def test_values_are_replaced_copied_and_pickled() -> None:
    for value in (Point(1, 3), Named(1, 3, "n"), Foreign(1, 3, "n")):
        replaced = dataclasses.replace(value, y=4)
        assert (replaced.x, replaced.y) == (1, 4)
        assert copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value
    assert pickle.loads(pickle.dumps(Open(5))) == Open(5)


def test_a_value_that_holds_itself_is_printed() -> None:
    node = Node([])
    node.children.append(node)
    assert repr(node) == "Node(children=[...])"
