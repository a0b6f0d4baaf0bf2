"""A backend failure outside of requests does not end the process. A failure at any point of a step
gives each of the step's requests one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.drive import GREEDY, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import BackendFailure, Chunk, NoCellsError
from support.requests import request_for
from support.scripted_backend import ScriptedBackend


class Faulty(ScriptedBackend):
    """A backend that fails when `when` returns an error. `when` gets the name of the operation and
    the number of rows."""

    def __init__(self, when: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.when = when

    def step(self, chunks: Sequence[Chunk]) -> Any:
        rows = sum(c.outputs for c in chunks)
        if error := self.when("step", rows):
            raise error
        result = super().step(chunks)
        for name in ("argmax", "logits"):
            real = getattr(result, name)

            def read(chunk: int, name: str = name, real: Any = real) -> Any:
                if error := self.when(name, rows):
                    raise error
                return real(chunk)

            setattr(result, name, read)
        return result


@pytest.mark.parametrize("what", ["step", "argmax"])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_failed_probe_ends_only_drafting(what: str, rows: int) -> None:
    backend = Faulty(
        lambda at, n: BackendFailure("no kernel") if at == what and n == rows and idle else None
    )
    engine = Engine(backend, EngineSettings(draft="auto"))
    idle = True
    for _ in range(200):
        if not engine.idle():
            break
    idle = False
    said = engine.snapshot()["speculation"]
    assert "no kernel" in str(said)
    assert str(rows) in str(said)
    outcome = run(
        engine, request_for("a", "hello " * 5, max_tokens=20, sampling=GREEDY, ignore_eos=True)
    )
    assert len(outcome.tokens["a"]) == 20
    assert engine.snapshot()["drafted_tokens"] == 0
    engine.check_integrity()


def test_a_probe_without_free_cells_runs_later() -> None:
    full = True
    backend = Faulty(lambda at, n: NoCellsError("full") if full and at == "step" else None)
    engine = Engine(backend, EngineSettings(draft="auto"))
    assert not engine.idle()
    full = False
    while engine.idle():
        pass
    assert engine.snapshot()["speculation"] == "on"
    assert engine.speculator.cost.known


@pytest.mark.parametrize(
    ("what", "sampling"), [("argmax", {"temperature": 0.0}), ("logits", {"temperature": 1.0})]
)
def test_outputs_that_can_not_be_read_end_the_step_s_requests_with_one_error_each(
    what: str, sampling: dict[str, float]
) -> None:
    from localllm.engine.messages import Sampling

    reads = 0

    def when(at: str, rows: int) -> Exception | None:
        nonlocal reads
        reads += at == what
        # In the middle of a step with two requests: the first one's outputs were already read.
        return BackendFailure("the device was lost") if at == what and reads == 12 else None

    backend = Faulty(when)
    engine = Engine(backend)
    wish = Sampling(**sampling, seed=1)
    both = [
        request_for(k, f"hello {k}", max_tokens=30, sampling=wish, ignore_eos=True) for k in "ab"
    ]
    outcome = run(engine, *both)
    for key in "ab":
        failure = outcome.failure(key)
        assert failure.code == "backend_error"
        assert "the device was lost" in failure.message
    settle(engine)
    engine.check_integrity()
    again = run(engine, request_for("c", "hello c", max_tokens=5, sampling=GREEDY, ignore_eos=True))
    assert len(again.tokens["c"]) == 5
