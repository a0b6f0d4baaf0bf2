"""Checks of a backend on a real device, in addition to the contract's (conformance.py).

They cover what users of a device see: the text, many streams at once, KV types, the memory, and
prompts that are stored before a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from localllm_backends.conformance import require
from localllm_backends.contract import Backend, BackendFailure, Chunk

# Rounding moves a logit by up to 0.6 between kernels. A device that computes wrong results is off
# by ten.
TIE_LOGITS = 1.0
_STREAMS = 4
_DECODED_TOKENS = 8
_STORED_TOKENS = 200
_MIN_BYTES = 20

Outcome = dict[str, Any]
Check = Callable[[], Outcome]


def run_checks(checks: Sequence[tuple[str, Check]]) -> Iterator[Outcome]:
    """Yield each check's name before it runs, then its outcome: "ok" or "failed", with a
    sentence."""
    for name, check in checks:
        yield {"check": name}
        started = time.perf_counter()
        outcome: Outcome = {"check": name, "outcome": "ok", "said": "", "noise": 0.0}
        try:
            outcome |= check()
        except (BackendFailure, AssertionError) as e:
            outcome |= {"outcome": "failed", "said": str(e) or type(e).__name__}
        yield outcome | {"seconds": time.perf_counter() - started}


class DeviceChecks:
    """Checks on `backend`, which must be able to hold `_STREAMS` sequences.

    `text`: several sentences. `file`: for the KV that a new process reads again.
    """

    def __init__(self, backend: Backend, text: str, file: Path) -> None:
        self._backend = backend
        tokens = backend.tokenize(text, special=False)
        self._tokens = (tokens * _STORED_TOKENS)[:_STORED_TOKENS]
        self._file = file

    def before_restart(self, pairs: Sequence[Sequence[str]]) -> list[tuple[str, Check]]:
        """Return the checks of the first process."""

        def kv_types() -> Outcome:
            return self._kv_types(pairs)

        return [
            ("a burst of streams decodes as each does alone", self._burst),
            ("accepted drafts stay and rejected ones leave no trace", self._drafts),
            ("small KV types stay near the usual one", kv_types),
            ("memory grows with the prompt", self._memory),
            ("a prompt is stored for the next start", self._store),
        ]

    def after_restart(self) -> list[tuple[str, Check]]:
        """Return the checks of the second process."""
        return [("a prompt from before a restart continues as before", self._restore)]

    def _continued(self, sequence: int, tokens: Sequence[int]) -> list[int]:
        """Return greedy tokens after `tokens` on `sequence`."""
        backend = self._backend
        step = backend.info.n_batch
        for at in range(0, len(tokens), step):
            result = backend.step([Chunk(sequence, list(tokens[at : at + step]))])
        chosen = [result.argmax(0)[-1]]
        while len(chosen) < _DECODED_TOKENS:
            chosen.append(backend.step([Chunk(sequence, chosen[-1:])]).argmax(0)[-1])
        return chosen

    def _burst(self) -> Outcome:
        backend = self._backend
        prompts = [self._tokens[: 20 + 5 * i] for i in range(_STREAMS)]
        alone = []
        for prompt in prompts:
            sequence = backend.new_sequence()
            alone.append(self._continued(sequence, prompt))
            backend.drop(sequence)
        streams = [backend.new_sequence() for _ in prompts]
        for sequence, prompt in zip(streams, prompts, strict=True):
            backend.step([Chunk(sequence, prompt, outputs=0)])
            backend.truncate(sequence, len(prompt) - 1)
        last = [prompt[-1] for prompt in prompts]
        worst = 0.0
        for i in range(_DECODED_TOKENS):
            chunks = [Chunk(s, [t]) for s, t in zip(streams, last, strict=True)]
            result = backend.step(chunks)
            last = [tokens[i] for tokens in alone]
            for row, token in enumerate(last):
                logits = result.logits(row)[-1]
                worst = max(worst, float(logits.max() - logits[token]))
        for sequence in streams:
            backend.drop(sequence)
        require(worst <= TIE_LOGITS, f"a stream's token is {worst:.3g} below the best one")
        return {"noise": worst, "said": f"{_STREAMS} streams"}

    def _drafts(self) -> Outcome:
        backend = self._backend
        if backend.capabilities.rewind == "none":
            return {"outcome": "not here", "said": "this memory can't take drafts back"}
        prompt = self._tokens[:40]
        sequence = backend.new_sequence()
        right = self._continued(sequence, prompt)
        backend.drop(sequence)
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, prompt[:-1], outputs=0)])
        # One draft is accepted, and the next one is wrong.
        wrong = (right[1] + 1) % backend.info.n_vocab
        logits = backend.step([Chunk(sequence, [prompt[-1], right[0], wrong], 3)]).logits(0)
        worst = max(float(logits[i].max() - logits[i][right[i]]) for i in range(2))
        backend.truncate(sequence, len(prompt) + 1)
        row = backend.step([Chunk(sequence, [right[1]])]).logits(0)[-1]
        worst = max(worst, float(row.max() - row[right[2]]))
        backend.drop(sequence)
        require(worst <= TIE_LOGITS, f"a token after drafts is {worst:.3g} below the best one")
        return {"noise": worst}

    def _kv_types(self, pairs: Sequence[Sequence[str]]) -> Outcome:
        found = self._backend.compare_kv([(k, v) for k, v in pairs], self._tokens)
        listed = [f"{f.k} {f.mean_kl:.4f} nats, {f.flips:.1%} flips" for f in found]
        return {"said": "; ".join(listed) or "this model's KV can't be quantised"}

    def _memory(self) -> Outcome:
        backend = self._backend
        empty = backend.memory()
        sequence = backend.new_sequence()
        self._continued(sequence, self._tokens)
        report = backend.memory()
        backend.drop(sequence)
        return {
            "weights_bytes": report.weights_bytes,
            "kv_bytes": report.kv_bytes - empty.kv_bytes,
            "kv_type": backend.info.kv_type_k,
            "n_tokens": _STORED_TOKENS,
        }

    def _store(self) -> Outcome:
        backend = self._backend
        sequence = backend.new_sequence()
        stored_tokens = self._tokens[:-1]
        step = backend.info.n_batch
        for at in range(0, len(stored_tokens), step):
            backend.step([Chunk(sequence, stored_tokens[at : at + step], outputs=0)])
        data = backend.export_range(sequence, 0, len(stored_tokens))
        state = b""
        if backend.capabilities.states:
            state = backend.export_state(sequence)
        chosen = self._continued(sequence, self._tokens[-1:])
        backend.drop(sequence)
        self._file.write_bytes(len(data).to_bytes(8, "little") + data + state)
        return {"tokens": chosen, "said": f"{len(data) + len(state)} bytes"}

    def _restore(self) -> Outcome:
        backend = self._backend
        body = memoryview(self._file.read_bytes())
        require(len(body) > _MIN_BYTES, "the stored prompt is missing")
        end = 8 + int.from_bytes(body[:8], "little")
        n_stored = len(self._tokens) - 1
        sequence = backend.new_sequence()
        backend.import_range(sequence, body[8:end], 0, n_stored)
        if backend.capabilities.states:
            backend.import_state(sequence, body[end:], n_stored)
        return {"tokens": self._continued(sequence, self._tokens[-1:])}
