"""Test a backend on a real model, in a process of its own.

It runs ten greedy tokens, the contract's checks (conformance.py), a timed turn, or a comparison of
KV types. A broken engine build may crash, hang or compute wrong results. So a build is tested with
this program:

    python -m localllm_backends.self_test llamacpp greedy MODEL '{"layers": 0}'
    python -m localllm_backends.self_test llamacpp greedy MODEL '{"layers": -1, "follow": [284, 1904]}'
    python -m localllm_backends.self_test llamacpp conformance MODEL '{"layers": -1}'
    python -m localllm_backends.self_test mlx device MODEL '{"text": "…", "file": "…", "pairs": []}'
    python -m localllm_backends.self_test mlx restart MODEL '{"text": "…", "file": "…"}'
    python -m localllm_backends.self_test llamacpp turn MODEL '{"layers": -1}'
    python -m localllm_backends.self_test llamacpp kv MODEL '{"text": "…", "pairs": [["q8_0", "q4_0"]]}'

It prints JSON lines to standard output. The first argument may also be a file format ("gguf").

`greedy` prints one line: the chosen tokens and their text, and the seconds per token. `gaps` gives,
for each token, the difference in logits to the best token (all zeros without `follow`). With
`follow`, each step continues from the given token instead of the chosen one, so that the result of
a step does not depend on the choice before.
`conformance` prints a line before and after each check, so that a crash can be assigned to a check.
`device` does the same, and then the checks in device_checks.py. `restart` does those that continue
in a new process.
`turn` prints the shortest time in seconds for a prompt and an answer, over several runs.
`kv` prints the loss of precision for each pair of KV types over the text, and the identity of the
model and the build.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from localllm_backends import registry
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    Chunk,
    LoadError,
    LoadSpec,
    Placement,
)
from localllm_backends.device_checks import DeviceChecks, run_checks
from localllm_backends.probe_process import print_answers

# Even the smallest model is almost certain of the next tokens here. Near ties would not test a
# device.
PROMPT = "The alphabet begins with these letters: A, B, C, D, E, F, G,"
N_TOKENS = 10
_BATCH = 64
_TURN_READ = 256
_TURN_WRITTEN = 32
_TURNS = 3


def greedy(backend: Backend, follow: Sequence[int] = ()) -> dict[str, Any]:
    """Decode ten tokens after the prompt and return them with their gaps and times.

    With `follow`, continue with its tokens instead. The gap is then the best logit minus the logit
    of the given token.
    """
    import numpy as np

    sequence = backend.new_sequence()
    tokens = backend.tokenize(PROMPT, add_bos=True)
    chosen: list[int] = []
    gaps: list[float] = []
    ended_s: list[float] = []
    for index in range(len(follow) or N_TOKENS):
        row = backend.step([Chunk(sequence, tokens)]).logits(0)[-1]
        ended_s.append(time.perf_counter())
        best = int(row.argmax())
        token = follow[index] if follow else best
        if np.isfinite(row).all():
            gaps.append(float(row[best]) - float(row[token]))
        else:
            # A row with NaN or infinities is invalid, whatever its argmax. JSON has no infinity.
            gaps.append(1e30)
        chosen.append(best)
        tokens = [token]
    backend.drop(sequence)
    decode_s = (ended_s[-1] - ended_s[0]) / max(len(chosen) - 1, 1)
    text = backend.detokenize(chosen)
    return {"tokens": chosen, "text": text, "gaps": gaps, "decode_s": decode_s}


def turn(backend: Backend) -> dict[str, Any]:
    """Time a prefill of `_TURN_READ` tokens and a decode of `_TURN_WRITTEN` tokens, in seconds.

    Returns the shortest of several runs, since disturbances only make a run longer.
    """
    prompt = (backend.tokenize(PROMPT, add_bos=True) * _TURN_READ)[:_TURN_READ]
    seconds = []
    for _ in range(_TURNS):
        sequence = backend.new_sequence()
        started = time.perf_counter()
        for start in range(0, len(prompt), _BATCH):
            backend.step([Chunk(sequence, prompt[start : start + _BATCH])])
        for token in prompt[:_TURN_WRITTEN]:
            backend.step([Chunk(sequence, [token])]).logits(0)
        seconds.append(time.perf_counter() - started)
        backend.drop(sequence)
    return {"turn_s": min(seconds)}


def kv_fidelity(backend: Backend, text: str, pairs: Sequence[Sequence[str]]) -> dict[str, Any]:
    tokens = backend.tokenize(text, special=False)
    found = backend.compare_kv([(k, v) for k, v in pairs], tokens)
    info = backend.info
    return {
        "model": info.description,
        "fingerprint": info.fingerprint,
        "meaning": info.kv_meaning,
        "found": [asdict(fidelity) for fidelity in found],
    }


def conformance(backend: Backend) -> Iterator[dict[str, Any]]:
    """Yield each check's name before it runs, then its outcome.

    The outcome is "ok", "not here" or "failed", with a sentence.
    """
    from localllm_backends.conformance import CHECKS, NotApplicable, Subject

    subject = Subject(backend)
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        yield {"check": name}
        started = time.perf_counter()
        outcome = "ok"
        sentence = ""
        try:
            subject.examine(check)
            backend.check_integrity()
        except NotApplicable as e:
            outcome = "not here"
            sentence = str(e)
        except (BackendFailure, AssertionError) as e:
            outcome = "failed"
            sentence = str(e) or type(e).__name__
        seconds = time.perf_counter() - started
        yield {
            "check": name,
            "outcome": outcome,
            "said": sentence,
            "seconds": seconds,
            "noise": subject.worst,
        }


def answers(engine: str, test: str, path: str, body: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that the program prints for these arguments."""
    wanted = json.loads(body)
    known = registry.backends()
    backend_type = known.get(engine) or known.get(registry.running(engine).name)
    if backend_type is None:
        raise LoadError(f"there is no backend {engine!r}")
    spec = LoadSpec(
        path,
        n_ctx=512,
        n_seq_max=4,
        n_batch=_BATCH,
        placement=Placement(gpu_layers=wanted.get("layers", -1)),
    )
    with closing(backend_type.load(spec)) as backend:
        if test == "conformance":
            yield from conformance(backend)
        elif test == "kv":
            yield kv_fidelity(backend, wanted["text"], wanted["pairs"])
        elif test == "turn":
            yield turn(backend)
        elif test in ("device", "restart"):
            checks = DeviceChecks(backend, wanted["text"], Path(wanted["file"]))
            if test == "device":
                yield from conformance(backend)
                yield from run_checks(checks.before_restart(wanted["pairs"]))
            else:
                yield from run_checks(checks.after_restart())
        else:
            yield greedy(backend, wanted.get("follow", ()))


if __name__ == "__main__":
    sys.exit(print_answers(partial(answers, *sys.argv[1:])))
