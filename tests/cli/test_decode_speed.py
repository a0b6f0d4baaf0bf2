"""A start that is slower than the last one causes a notice.

The tests cover the comparison, the text, and the real engine slowed down.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.cli.serve import decode_speed
from localllm.cli.serve.decode_speed import (
    DecodeSpeedWatch,
    compare_and_store,
    depth_bin,
    slowdown_text,
    steps_of,
)
from localllm.cli.serve.served_models import planned_model
from localllm.engine.messages import Generation, Request, Sampling
from localllm.server.dialects.openai.routes import entry as model_entry
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.worker import ModelWorker, PlannedModel
from support.requests import events_of
from support.scripted_engine import ScriptedEngine

USUAL = {"0": 0.010, "128": 0.011}


def test_only_a_slowdown_of_at_least_20_percent_causes_a_notice() -> None:
    assert slowdown_text("m", {"0": 0.0115, "128": 0.0125}, USUAL) == ""
    text = slowdown_text("m", {"0": 0.0126, "128": 0.0138}, USUAL)
    assert text == "m is slower than before on this machine: 72.5 tok/s instead of the usual 90.9"


def test_no_notice_without_an_earlier_start_at_the_same_depths() -> None:
    assert slowdown_text("m", {"0": 1.0}, {}) == ""
    assert slowdown_text("m", {"4096": 1.0}, USUAL) == ""


def test_a_slow_start_becomes_the_usual_speed_only_after_a_second_one() -> None:
    starts = [0.010, 0.020, 0.010, 0.020, 0.021, 0.020]
    assert [bool(compare_and_store("m", "m", {"0": step_s})) for step_s in starts] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


@given(st.integers(0, 200_000), st.integers(0, 200_000))
def test_depths_in_one_bin_are_close(a: int, b: int) -> None:
    if depth_bin(a) == depth_bin(b):
        assert abs(a - b) < 128 or max(a, b) / min(a, b) < 2 ** (1 / 8) + 0.01


def test_the_faster_half_of_the_steps_at_a_depth_counts() -> None:
    assert steps_of([[10, 0.03], [20, 0.01], [100, 0.011], [300, 0.02]]) == {
        "0": 0.011,
        "256": 0.02,
    }


def test_usual_speeds_are_stored_and_a_damaged_file_is_ignored() -> None:
    for i in range(100):
        compare_and_store(f"m{i}", "m", {"0": 0.01})
    compare_and_store("m99", "m", {"128": 0.02})
    assert len(decode_speed.load()) == 64
    assert decode_speed.load()["m99"].steps == {"0": 0.01, "128": 0.02}
    for text in (
        "",
        "[]",
        '{"m": []}',
        '{"m": [1, {"steps": {"0": "x"}}]}',
        '{"m": {"steps": {"0": -1.0}}}',
    ):
        decode_speed.path().write_text(text)
        assert decode_speed.load() == {}


async def _start(model: Path, said: list[str], tokens: int = 400) -> bool:
    """Start `model` once and write `tokens`. Return whether the start could be compared."""
    from localllm.load.load_plan import load_plan_named
    from localllm.settings import Settings

    load = load_plan_named(str(model), Settings({"context": 1024}))
    ready = planned_model(load)
    worker = ModelWorker("m", ready)
    router = ModelRouter([ServedModel("m", worker=worker)])
    watch = DecodeSpeedWatch(router, said.append)
    try:
        engine = await worker.engine()
        for i in range(8):
            greedy = Generation(
                Sampling(temperature=0.0), tokens, ignore_eos=True, cache_prompt=False
            )
            with worker.lease():
                async for _ in events_of(
                    engine, Request(f"r{i}", f"Story {i}.", greedy, draft="off")
                ):
                    pass
            await watch.check()
            if watch.compared:
                return True
        return False
    finally:
        await router.close()


@pytest.mark.long
def test_a_start_with_one_thread_is_noticed(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with one thread is noticed.

    This slows the real engine down like a bad update, after two normal starts. If other programs
    use the machine all the time, no start can be compared, and no notice is shown.
    """
    said: list[str] = []
    for _ in range(2):
        if not asyncio.run(_start(smollm2, said)):
            pytest.skip("other programs have the processors: no start could be compared")
    assert said == []
    monkeypatch.setenv("LOCALLLM_THREADS", "1")
    if not asyncio.run(_start(smollm2, said)):
        pytest.skip("other programs have the processors: the slow start could not be compared")
    assert len(said) == 1


# Computes until its parent is gone, because a test that its time limit ends does not clean up.
_COMPUTING = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_starts_under_load_of_other_programs_cause_no_false_notice(smollm2: Path) -> None:
    """Load from other programs causes no false notice.

    One to four programs compute all the time, on any number of cores. Their share is not counted
    as the model's.
    """
    said: list[str] = []
    for _ in range(2):
        if not asyncio.run(_start(smollm2, said)):
            pytest.skip("other programs have the processors: no start could be compared")
    for n in range(20):
        with ExitStack() as stack:
            for _ in range(1 + n % 4):
                other = stack.enter_context(subprocess.Popen([sys.executable, "-c", _COMPUTING]))
                stack.callback(other.kill)
            asyncio.run(_start(smollm2, said, tokens=120))
    assert said == []


class _Measured(ScriptedEngine):
    """An engine with steps of this length, and at the same time the host whose client it is."""

    step_s = 0.010

    @property
    def client(self) -> _Measured:
        return self

    async def snapshot(self) -> dict[str, Any]:
        return {"pace": {"spans": [[64, self.step_s]] * 8, "disturbed": 0}}


def test_each_start_is_compared_once_and_a_slow_one_is_reported() -> None:
    async def go() -> list[str]:
        said: list[str] = []
        for step_s in (0.010, 0.011, 0.030):
            host = _Measured()
            host.step_s = step_s
            router = ModelRouter([ServedModel("m", worker=ModelWorker("m", PlannedModel(host)))])
            watch = DecodeSpeedWatch(router, said.append)
            await watch.check()
            assert not watch.compared, "nothing is loaded for it"
            await router.resolve("m").worker.engine()
            for _ in range(2):
                await watch.check()
            assert model_entry(router.resolve("m")).get("notice", "") == "".join(said)
        return said

    (said,) = asyncio.run(go())
    assert said == "m is slower than before on this machine: 33.3 tok/s instead of the usual 90.9"
