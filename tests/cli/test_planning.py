"""Plans made in another process are the same as in this one, whatever happens to that process."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from localllm.cli.chat.model_service import LocalModelService
from localllm.cli.chat.planning import PlanningProcess
from localllm.device.types import DeviceNotFoundError, Figure
from localllm.errors import LocalLLMError, UsageError
from localllm.planner import recommend
from localllm_tui.control.interfaces import PlanChoice, PlanRequest
from support.until import until

APPLE = PlanRequest(machine="M4 Max 128GB")


@pytest.fixture
def desk() -> Iterator[PlanningProcess]:
    service = PlanningProcess(offline=True)
    try:
        yield service
    finally:
        service.close()


def test_another_process_makes_the_same_plans_as_this_one(
    desk: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = LocalModelService().plan(APPLE)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("planned in this process")

    monkeypatch.setattr(recommend, "recommend", refused)
    told: list[PlanChoice] = []
    assert desk.plan(APPLE, told.append) == here
    assert {c.ref for c in here.choices} <= {c.ref for c in told}  # each plan before the full list
    children = psutil.Process().children()
    with pytest.raises(LocalLLMError) as caught:
        desk.plan(PlanRequest(machine="a toaster"))
    assert caught.value.hint
    assert type(caught.value) is not LocalLLMError  # the error of the other process
    assert desk.explain(APPLE, here.choices[0].ref, 80)
    assert psutil.Process().children() == children  # the same process for all plans
    for child in children:
        child.kill()
    until(
        lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    )
    assert desk.plan(APPLE).choices == here.choices  # a new process
    desk.close()
    alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    assert not [c for c in alive if "planning" in " ".join(c.cmdline())]


def test_a_process_that_prepares_makes_the_plans_afterwards(desk: PlanningProcess) -> None:
    prepared = desk.start(APPLE)
    prepared.result(timeout=60)
    children = psutil.Process().children()
    assert desk.plan(APPLE).choices
    assert psutil.Process().children() == children
    with pytest.raises(DeviceNotFoundError):
        desk.start(PlanRequest(machine="a toaster")).result(timeout=60)


def test_figures_of_this_machine_are_read_again_after_the_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory and measured speeds may change between the start of a chat and its first plan."""
    from localllm.load import candidates

    real = candidates.device_and_overrides
    read: list[object] = []

    def counted(*given: object, **more: object) -> object:
        read.append(given)
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(candidates, "device_and_overrides", counted)
    service = LocalModelService()
    service.prepare(PlanRequest())
    service.plan(PlanRequest())
    service.plan(PlanRequest())
    assert len(read) == 2


def test_a_memory_speed_of_a_busy_machine_is_marked_and_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A memory speed measured on a busy machine is marked and measured again.

    The figure itself carries the mark; the name of its source does not matter.
    """
    from dataclasses import replace

    from localllm.load import candidates

    real = candidates.device_and_overrides
    asked: list[object] = []

    def busy_at_first(*given: object, **more: object) -> object:
        asked.append(given)
        device, overrides = real(*given, **more)  # type: ignore[arg-type]
        figure = Figure(100.0, "measured", "a probe", busy=len(asked) == 1)
        return replace(device, bandwidth_gbps=figure), overrides

    monkeypatch.setattr(candidates, "device_and_overrides", busy_at_first)
    service = LocalModelService()
    assert "while other programs ran" in service.plan(APPLE).machine
    assert "while other programs ran" not in service.plan(APPLE).machine
    service.plan(APPLE)
    assert len(asked) == 2  # a measurement on an idle machine is kept


def test_prompts_may_be_prefilled_on_another_machine() -> None:
    """Prompts may be prefilled on another machine.

    The plans are those of the second machine, with the first machine's gain noted for each.
    """
    joined = PlanRequest(machine="dgx spark --with M4 Max 128GB --link 10gbe")
    service = LocalModelService()
    found = service.plan(joined)
    alone = service.plan(APPLE)
    assert [c.ref for c in found.choices] == [c.ref for c in alone.choices]
    assert "prefill on DGX Spark" in found.machine
    assert {choice.note for choice in alone.choices} == {""}
    notes = {choice.ref: choice.note for choice in found.choices}
    assert all("here alone" in n or "only between equal engines" in n for n in notes.values())
    gains = next(ref for ref, note in notes.items() if "pays from" in note)
    why = "\n".join(service.explain(joined, gains, 80))
    assert "overlapped in parts" in why
    assert "half of the layers on each" in why
    for wrong in ("dgx spark --with m4 max 128GB --link string", "toaster --with m2 --link 10gbe"):
        with pytest.raises((UsageError, DeviceNotFoundError)):
            service.prepare(PlanRequest(machine=wrong))


def test_an_invalid_plan_request_is_refused(desk: PlanningProcess) -> None:
    with pytest.raises((UsageError, LocalLLMError)):
        desk.plan(PlanRequest(purpose="flying"))
