"""From a model's name to a running engine: the file is read once, and few packages are called."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from localllm.load.load_plan import load_plan_named, make_load_plan
from localllm.settings import Settings

_OPENED: list[str] | None = None


def _hear(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and _OPENED is not None and isinstance(args[0], str | os.PathLike):
        _OPENED.append(os.fspath(args[0]) if isinstance(args[0], os.PathLike) else args[0])


sys.addaudithook(_hear)


@contextmanager
def _opened_files() -> Iterator[list[str]]:
    global _OPENED
    _OPENED = found = []
    try:
        yield found
    finally:
        _OPENED = None


def test_the_file_of_a_model_is_read_once(tiny_model: Path) -> None:
    local = load_plan_named(str(tiny_model), Settings({"context": 1024})).local
    with _opened_files() as opened:
        load = make_load_plan(local, Settings({"context": 1024}))
    assert load.plan is not None
    assert opened.count(str(tiny_model)) == 1


_EVERYBODYS = (
    "localllm.load", "localllm.errors", "localllm.json_store", "localllm.paths",
    "localllm.settings",
)  # fmt: skip


def _rooms_called(model: Path) -> list[str]:
    """Return the packages that `localllm.load` calls, in order, without those in `_EVERYBODYS`."""
    calls: list[str] = []

    def hear(frame: FrameType, event: str, _arg: object) -> None:
        caller = frame.f_back
        if (
            event != "call"
            or caller is None
            or not caller.f_globals.get("__name__", "").startswith("localllm.load.")
        ):
            return
        package, *rest = frame.f_globals.get("__name__", "").split(".")
        room = f"localllm.{rest[0]}" if package == "localllm" and rest else package
        if frame.f_code.co_name == "<module>" or not room.startswith("localllm"):
            return
        if room not in (*_EVERYBODYS, *calls[-1:]):
            calls.append(room)

    sys.setprofile(hear)
    try:
        load_plan_named(str(model), Settings({"context": 1024}))
    finally:
        sys.setprofile(None)
    return calls


def test_loading_a_model_calls_few_packages(tiny_model: Path) -> None:
    load_plan_named(str(tiny_model), Settings({"context": 1024}))
    rooms = _rooms_called(tiny_model)
    assert len(set(rooms)) <= 12, rooms
    assert len(rooms) - len(set(rooms)) <= 6, rooms
