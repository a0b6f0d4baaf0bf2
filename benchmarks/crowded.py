"""The cost of idle conversations for a short chat: its speed with 12,000 cached tokens and without.

python -m benchmarks.crowded [--rounds 20] [--idle 4000] [--model FILE] [--out FILE]

Two engines in one process run in turn, because a server that is measured before and after its cache
is filled shows the machine's drift. --idle: the cost of leaving that many tokens of a finished
conversation in the context, in milliseconds per step, and the prefill time in seconds that this
saves if the conversation continues.

"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.models import smollm2
from benchmarks.rounds import interleave, report, settle, timed
from localllm.bench.ratio import RoundComparison
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type

_LINES, _LINE_TOKENS = 6, 2000
_PROMPT_TOKENS, _ANSWER_TOKENS = 30, 64


class Chats:
    """One engine and its decode speed. No prompt is cached."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(backend_type.load(LoadSpec(str(path), n_ctx=16_384)))
        self._n = 0

    def decode_tok_s(self, n_prompt: int, n: int) -> float:
        """Return tokens/s after the first of `n` tokens that follow `n_prompt`. The engine is idle
        again afterwards."""
        self._n += 1
        vocabulary = self.engine.backend.info.n_vocab - 100
        prompt = [(i * 7919 + self._n * 104_729) % vocabulary + 50 for i in range(n_prompt)]
        request = Request(
            f"r{self._n}", prompt, Generation(Sampling(temperature=0.0), n, ignore_eos=True)
        )
        _, seconds = timed(self.engine, request, prompt)
        settle(self.engine)
        return (n - 1) / seconds


def idle(path: Path, n_tokens: int, rounds: int) -> RoundComparison:
    """Compare a decode step with `n_tokens` of an idle sequence in the context and without."""
    backend = backend_type.load(LoadSpec(str(path), n_ctx=n_tokens + 1024))
    table = RoundComparison(f"a step beside {n_tokens:,} idle tokens", "ms", "less")

    def read(sequence: int, n: int) -> None:
        for at in range(0, n, 512):
            tokens = [
                (i * 7919) % (backend.info.n_vocab - 100) + 50 for i in range(at, min(at + 512, n))
            ]
            backend.step([Chunk(sequence, tokens, outputs=1)]).argmax(0)

    def steps(name: str, sequence: int) -> None:
        begun, length = time.perf_counter(), backend.length(sequence)
        for _ in range(_ANSWER_TOKENS):
            backend.step([Chunk(sequence, [50], outputs=1)]).argmax(0)
        table.add(name, (time.perf_counter() - begun) / _ANSWER_TOKENS * 1e3)
        backend.truncate(sequence, length)

    for _ in range(rounds):
        running = backend.new_sequence()
        read(running, _PROMPT_TOKENS)
        steps("alone", running)
        resident, begun = backend.new_sequence(), time.perf_counter()
        read(resident, n_tokens)
        table.add("prefill it keeps", (time.perf_counter() - begun) * 1e3)
        steps("beside it", running)
        backend.drop(resident)
        backend.drop(running)
    backend.close()
    more_ms, kept_s = (
        table.median("beside it") - table.median("alone"),
        table.median("prefill it keeps") / 1e3,
    )
    print(
        f"{more_ms:.2f} ms more a step for {kept_s:.1f} s of prefill kept: "
        f"{more_ms / kept_s:.3f} "
        "ms a second"
    )
    return table


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = arguments.model or smollm2()
    if arguments.idle:
        report([idle(path, arguments.idle, arguments.rounds)], "beside it", arguments.out)
        return
    empty, crowded = Chats(path), Chats(path)
    for _ in range(_LINES):
        crowded.decode_tok_s(_LINE_TOKENS, 2)
    table = RoundComparison(f"short chat beside {_LINES * _LINE_TOKENS:,} cached tokens", "tok/s")

    def one(name: str, chats: Chats) -> None:
        table.add(name, chats.decode_tok_s(_PROMPT_TOKENS, _ANSWER_TOKENS))

    for chats in (empty, crowded):
        chats.decode_tok_s(_PROMPT_TOKENS, _ANSWER_TOKENS)
    interleave(arguments.rounds, lambda: one("empty", empty), lambda: one("crowded", crowded))
    report([table], "crowded", arguments.out)
    empty.engine.close()
    crowded.engine.close()


if __name__ == "__main__":
    main()
