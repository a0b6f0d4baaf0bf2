"""Cancelling a request in the middle of a step stops the step early. No part of that step is kept,
and no other data is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.drive import GREEDY, Outcome, run
from localllm.engine.core import Engine
from localllm.engine.messages import Prefill, Queued
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import Chunk, InterruptedStepError, LoadSpec, Placement
from localllm_backends.llamacpp import backend_type as llamacpp
from models import tiny_gguf
from support.requests import events_of, request_for
from support.scripted_backend import ScriptedBackend, ScriptedResult


class Interruptible(ScriptedBackend):
    """A backend that calls `meanwhile` in another thread during every step and can be interrupted
    by it."""

    def __init__(self) -> None:
        super().__init__(n_ctx=1024, n_batch=64)
        self.capabilities = replace(self.capabilities, interruptible=True)
        self.meanwhile: Callable[[], None] = lambda: None
        self.interrupted = 0
        self._wanted = False

    def interrupt(self) -> None:
        self._wanted = True

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        other = threading.Thread(target=self.meanwhile)
        other.start()
        other.join()
        if self._wanted:
            self._wanted = False
            self.interrupted += 1
            raise InterruptedStepError("interrupted")
        return super().step(chunks)


def words(n: int, seed: int) -> list[int]:
    return [3 + (i * 7 + seed * 31) % 250 for i in range(n)]


def test_cancelling_a_single_prompt_interrupts_its_step() -> None:
    backend = Interruptible()
    engine = Engine(backend)
    engine.submit(request_for("a", words(300, 1), 8, GREEDY), words(300, 1))
    engine.step()
    backend.meanwhile = lambda: engine.interrupt("a")
    events = engine.step()
    assert backend.interrupted == 1
    assert len(backend.steps) == 1
    assert all(isinstance(e, Prefill) for e in events), (
        "it has not ended yet: that is for its cancel to say"
    )
    outcome = Outcome()
    outcome.take(engine.cancel("a"))
    assert outcome.finish("a").reason == "cancelled"
    engine.check_integrity()
    backend.meanwhile = lambda: None
    again = run(engine, request_for("again", words(300, 1), 8, GREEDY, ignore_eos=True))
    plain = run(
        Engine(ScriptedBackend(n_ctx=1024)),
        request_for("x", words(300, 1), 8, GREEDY, ignore_eos=True),
    )
    assert again.tokens["again"] == plain.tokens["x"]
    assert again.finish("again").usage.cached_tokens == 64, "what the steps before had read"


def test_a_cancel_that_comes_before_the_step_is_not_lost() -> None:
    backend = Interruptible()
    engine = Engine(backend)
    engine.submit(request_for("a", words(300, 1), 8, GREEDY), words(300, 1))
    engine.interrupt("a")
    engine.step()
    assert not backend.steps
    engine.cancel("a")
    run(engine, request_for("a", words(30, 1), 8, GREEDY))


def test_cancelling_does_not_interrupt_a_step_shared_with_other_requests() -> None:
    backend = Interruptible()
    engine = Engine(backend)
    for key, n in (("short", 5), ("long", 300)):
        engine.submit(request_for(key, words(n, 2), 40, GREEDY, ignore_eos=True), words(n, 2))
    engine.step()
    engine.step()
    backend.meanwhile = lambda: engine.interrupt("long")
    for _ in range(3):
        engine.step()
    assert not backend.interrupted
    engine.cancel("long")
    while engine.has_work:
        engine.step()
    assert not backend.interrupted


def an_interrupted_step_changes_nothing(path: Path, layers: int) -> float:
    """Interrupt a step of the model in `path` with that many layers on a device. Return how far the
    logits then differ from those of an undisturbed sequence, as a share."""
    backend = llamacpp.load(
        LoadSpec(str(path), n_ctx=1024, n_batch=256, placement=Placement(gpu_layers=layers))
    )
    assert backend.capabilities.interruptible
    line, other = backend.new_sequence(), backend.new_sequence()
    for sequence in (line, other):
        backend.step([Chunk(sequence, words(200, 1), 0)])
    over = threading.Event()

    def pester() -> None:
        while not over.is_set():
            backend.interrupt()

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for _ in range(100):
            try:
                backend.step([Chunk(line, words(150, 2))])
            except InterruptedStepError:
                break
            backend.truncate(line, 200)
        else:
            pytest.fail("no step was interrupted")
        # A very short step ends before an interrupt.
        backend.step([Chunk(line, [5])])
        backend.truncate(line, 200)
    finally:
        over.set()
        thread.join()
    backend.check_integrity()
    assert backend.length(line) == 200
    try:
        backend.step([Chunk(line, words(40, 3), 0)])
    except InterruptedStepError:  # the last interrupt arrived after the step before
        backend.step([Chunk(line, words(40, 3), 0)])
    backend.truncate(line, 200)
    rows = [backend.step([Chunk(s, words(150, 2))]).logits(0)[-1].copy() for s in (line, other)]
    backend.close()
    return float(np.abs(rows[0] - rows[1]).max() / np.abs(rows[1]).max())


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize(
    "write", [tiny_gguf.write_llama, tiny_gguf.write_moe, tiny_gguf.write_sliding]
)
def test_an_interrupted_step_of_llama_cpp_changes_nothing(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    assert an_interrupted_step_changes_nothing(write(tmp_path / "m.gguf"), 0) <= 1e-3


def test_a_backend_with_recurrent_state_is_not_interruptible(tmp_path: Path) -> None:
    backend = llamacpp.load(
        LoadSpec(
            str(tiny_gguf.write_hybrid(tmp_path / "m.gguf")),
            n_ctx=256,
            placement=Placement(gpu_layers=0),
        )
    )
    assert not backend.capabilities.interruptible
    backend.close()


@pytest.mark.usefixtures("all_threads")
def test_a_worker_stops_prefilling_after_the_client_left(smollm2: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor(
            WorkerOptions(
                LoadSpec(str(smollm2), n_ctx=2048, n_batch=2048, placement=Placement(gpu_layers=0))
            )
        )
        try:
            engine = await supervisor.engine()
            first = events_of(engine, request_for("a", words(128, 1), 1, GREEDY))
            assert [e async for e in first]
            before = await engine.snapshot()
            stream = events_of(engine, request_for("b", words(1500, 2), 1, GREEDY))
            async for event in stream:
                if isinstance(event, Queued):
                    break
            await stream.aclose()
            after = await engine.snapshot()
        finally:
            await supervisor.close()
        assert (after["cancelled"], after["running"]) == (1, 0)
        assert after["prefilled_tokens"] == before["prefilled_tokens"]

    asyncio.run(main())


def largest_steps(interruptible: bool, others: int) -> int:
    """Return the number of tokens in the largest step of a prompt on a machine that prefills 700
    tokens/s, with that many other prompts."""
    backend = Interruptible()
    backend.capabilities = replace(backend.capabilities, interruptible=interruptible)
    backend.info = replace(backend.info, n_batch=512)
    now = [0.0]
    step = backend.step

    def timed(chunks: Seq[Chunk]) -> ScriptedResult:
        now[0] += sum(len(c.tokens) for c in chunks) / 700
        return step(chunks)

    backend.step = timed  # type: ignore[method-assign]
    engine = Engine(backend, clock=lambda: now[0])
    run(engine, request_for("before", words(200, 9), 1, GREEDY))
    before = len(backend.steps)
    run(
        engine,
        *(
            request_for(f"{i}", words(450, i), 1, GREEDY, ignore_eos=True)
            for i in range(1 + others)
        ),
    )
    return max(sum(n for _, n in s) for s in backend.steps[before:])


def test_a_step_is_long_only_for_a_single_interruptible_prompt() -> None:
    assert largest_steps(interruptible=True, others=0) == 450
    assert largest_steps(interruptible=False, others=0) == 192
    assert largest_steps(interruptible=True, others=1) >= 192
