"""No start is slower than earlier ones without a word: what is compared, what is said, and the real engine slowed down."""

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
    SpeedVerdict,
    StartRecord,
    depth_bin,
    judge,
    notice,
    steps_of,
)
from localllm.cli.serve.served_models import planned
from localllm.device.probes.conditions import Conditions, changed, moment
from localllm.engine.messages import Generation, Request, Sampling
from localllm.server.dialects.openai.routes import entry as model_entry
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.worker import ModelMetadata, ModelWorker
from support.scripted_engine import ScriptedEngine

USUAL = [StartRecord("2026-01-01", {"0": 0.010, "128": 0.011}, {"threads": "8", "NVIDIA driver": "570"})] * 3


def test_a_fifth_slower_is_slower_and_less_is_not() -> None:
    slow, even = judge({"0": 0.0126, "128": 0.0138}, USUAL), judge({"0": 0.0115, "128": 0.0125}, USUAL)
    assert slow is not None
    assert slow.slower
    assert even is not None
    assert not even.slower
    assert slow.before_tok_s == pytest.approx(100, rel=0.1)


def test_without_a_history_at_these_depths_nothing_is_said() -> None:
    assert judge({"0": 1.0}, USUAL[:1]) is None
    assert judge({"4096": 1.0}, USUAL) is None


def test_an_old_slow_start_and_a_lucky_one_do_not_decide() -> None:
    mixed = [StartRecord("", {"0": 0.5}), *USUAL, StartRecord("", {"0": 0.001})]
    verdict = judge({"0": 0.0105}, mixed)
    assert verdict is not None
    assert not verdict.slower


def test_the_notice_says_how_much_and_what_has_changed() -> None:
    here = Conditions({"threads": "1", "NVIDIA driver": "570"}, moment(hottest_c=97.0, beside=["blender"]))
    said = notice("m", SpeedVerdict(2.0, 50, 100, 3), USUAL, here)
    assert "50 tok/s, where 100 were usual (3 starts)" in said
    assert "threads: 8 → 1" in said
    assert "97 °C" in said
    assert "blender" in said
    assert "driver" not in said
    assert "Nothing known has changed" in notice(
        "m", SpeedVerdict(2.0, 50, 100, 3), USUAL, Conditions(USUAL[0].conditions)
    )


def test_what_could_not_be_read_has_not_changed() -> None:
    assert changed({"a": "1", "b": ""}, {"a": "", "b": "2", "c": "3"}) == []
    assert moment() == []


@given(st.integers(0, 200_000), st.integers(0, 200_000))
def test_depths_of_one_bin_are_near_each_other(a: int, b: int) -> None:
    if depth_bin(a) == depth_bin(b):
        assert abs(a - b) < 128 or max(a, b) / min(a, b) < 2 ** (1 / 8) + 0.01


def test_of_a_depth_the_faster_half_counts() -> None:
    assert steps_of([[10, 0.03], [20, 0.01], [100, 0.011], [300, 0.02]]) == {"0": 0.011, "256": 0.02}


def test_the_history_is_kept_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    file = tmp_path / "pace.json"
    for i in range(30):
        decode_speed.keep("m", StartRecord(f"{i}", {"0": 0.01}), file)
    decode_speed.keep("n", StartRecord("x", {"0": 0.02}, {"threads": "1"}, "slow"), file)
    found = decode_speed.load(file)
    assert [s.date for s in found["m"]][-1] == "29"
    assert len(found["m"]) == 20
    assert found["n"] == [StartRecord("x", {"0": 0.02}, {"threads": "1"}, "slow")]
    for text in ("", "[]", '{"models": []}', '{"models": {"m": [1, {"steps": {"0": "x"}, "date": ""}]}}'):
        file.write_text(text)
        assert not any(decode_speed.load(file).values())


async def _start(model: Path, said: list[str], tokens: int = 400) -> bool:
    """One start of `model` that writes `tokens`; whether it could be judged."""
    from localllm.load.load_plan import load_plan_named
    from localllm.settings import Settings

    load = load_plan_named(str(model), Settings({"context": 1024}))
    ready = planned(load)
    worker = ModelWorker("m", ready.host, ready.facts, loading=ready.loading)
    router = ModelRouter([ServedModel("m", worker=worker)])
    watch = DecodeSpeedWatch(router, said.append)
    try:
        engine = await worker.engine()
        for i in range(8):
            greedy = Generation(Sampling(temperature=0.0), tokens, ignore_eos=True, cache_prompt=False)
            with worker.lease():
                async for _ in engine.submit(Request(f"r{i}", f"Story {i}.", greedy, draft="off")):
                    pass
            await watch.look()
            if watch.judged:
                return True
        return False
    finally:
        await router.close()


@pytest.mark.long
def test_a_start_with_one_thread_is_noticed(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine, slowed down as a bad update would: the history is of two starts as ever. Where other programs have
    the machine all the while no start can be judged, and nothing is shown."""
    said: list[str] = []
    for _ in range(2):
        if not asyncio.run(_start(smollm2, said)):
            pytest.skip("other programs have the processors: no start could be judged")
    assert said == []
    monkeypatch.setenv("LOCALLLM_THREADS", "1")
    if not asyncio.run(_start(smollm2, said)):
        pytest.skip("other programs have the processors: the slow start could not be judged")
    assert len(said) == 1
    assert "threads: automatic → 1" in said[0]


# Computes until its parent is gone: a test that is ended by its time limit cleans nothing up.
_COMPUTING = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_starts_beside_other_programs_raise_no_false_notice(smollm2: Path) -> None:
    """One to four programs that compute all the while, on however many cores: what they take is not the model's."""
    said: list[str] = []
    for _ in range(2):
        if not asyncio.run(_start(smollm2, said)):
            pytest.skip("other programs have the processors: no start could be judged")
    for n in range(20):
        with ExitStack() as stack:
            for _ in range(1 + n % 4):
                other = stack.enter_context(subprocess.Popen([sys.executable, "-c", _COMPUTING]))
                stack.callback(other.kill)
            asyncio.run(_start(smollm2, said, tokens=120))
    assert said == []


class _Measured(ScriptedEngine):
    """An engine whose steps took so long; a host whose client it is."""

    step_s = 0.010

    @property
    def client(self) -> _Measured:
        return self

    async def snapshot(self) -> dict[str, Any]:
        return {"pace": {"spans": [[64, self.step_s]] * 8, "disturbed": 0}}


def test_each_start_is_judged_once_and_said_where_people_look() -> None:
    async def go() -> list[str]:
        said: list[str] = []
        for step_s in (0.010, 0.011, 0.030):
            host = _Measured()
            host.step_s = step_s
            router = ModelRouter([ServedModel("m", worker=ModelWorker("m", host, ModelMetadata()))])
            watch = DecodeSpeedWatch(router, said.append)
            await watch.look()
            assert not watch.judged, "nothing is loaded for it"
            await router.resolve("m").worker.engine()
            for _ in range(2):
                await watch.look()
            assert len(said) == len(watch.told)
            assert model_entry(router.resolve("m")).get("notice", "") == "".join(watch.told)
        return said

    (said,) = asyncio.run(go())
    assert said.startswith("m is slower than it was here: 33.3 tok/s, where 95.2 were usual (2 starts)")
    (starts,) = decode_speed.load().values()
    assert [start.notice for start in starts] == ["", "", said]
