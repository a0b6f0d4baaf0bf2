"""What idle conversations cost a short chat: its decode speed beside 12,000 cached tokens against an empty engine's.

python -m benchmarks.crowded [--rounds 20] [--model FILE] [--out FILE]

Two engines in one process, in turn: a server measured before and after filling its cache shows the machine's drift.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.models import smollm2
from benchmarks.rounds import interleave, report, write
from benchmarks.timing import settle, timed
from localllm.bench.ratio import RoundComparison
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type

_LINES, _LINE_TOKENS = 6, 2000
_PROMPT_TOKENS, _ANSWER_TOKENS = 30, 64


class Chats:
    """One engine and its decode speed; every prompt is new to it."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(backend_type.load(LoadSpec(str(path), n_ctx=16_384)))
        self._n = 0

    def decode_tok_s(self, n_prompt: int, n: int) -> float:
        """Tokens/s after the first of `n` tokens that follow `n_prompt`; everything has settled when it returns."""
        self._n += 1
        vocabulary = self.engine.backend.info.n_vocab - 100
        prompt = [(i * 7919 + self._n * 104_729) % vocabulary + 50 for i in range(n_prompt)]
        request = Request(f"r{self._n}", prompt, Generation(Sampling(temperature=0.0), n, ignore_eos=True))
        _, seconds = timed(self.engine, request, prompt)
        settle(self.engine)
        return (n - 1) / seconds


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    path = arguments.model or smollm2()
    empty, crowded = Chats(path), Chats(path)
    for _ in range(_LINES):
        crowded.decode_tok_s(_LINE_TOKENS, 2)
    table = RoundComparison(f"short chat beside {_LINES * _LINE_TOKENS:,} cached tokens", "tok/s")

    def one(name: str, chats: Chats) -> None:
        table.add(name, chats.decode_tok_s(_PROMPT_TOKENS, _ANSWER_TOKENS))

    for chats in (empty, crowded):
        chats.decode_tok_s(_PROMPT_TOKENS, _ANSWER_TOKENS)
    interleave(arguments.rounds, lambda: one("empty", empty), lambda: one("crowded", crowded))
    write(arguments.out, [report(table, "empty")])
    empty.engine.close()
    crowded.engine.close()


if __name__ == "__main__":
    main()
