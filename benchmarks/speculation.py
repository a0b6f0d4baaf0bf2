"""Drafting compared with plain decoding, for five kinds of text (bar: 0.97; copies 1.75).

python -m benchmarks.speculation [--rounds 5] [--model smollm2|gemma|FILE] [--draft FILE] [--streams
1,4] [--only copy] [--cpu]

Both take turns in one engine, with 1 and 4 streams. Decoding is greedy and the prefix cache is off,
so every round does the same work. Only decoding is timed: from the first token of the last stream
that began to the end. `--draft`: a second model, or a drafter trained for the first. `--cpu`: one
thread, and its processor time instead of the clock's, for a busy machine. `--costs
1,1.3,1.4,1.7,2.2,3.0`: the clock of a simulated device. Steps with 1, 2, 4, 8, 16 and 32 rows take
that many times a plain step, and a guess takes 0.08. The answers and guesses are real.

"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import gemma, smollm2
from benchmarks.rounds import interleave, report
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import NAMES, copy_edit
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Finish, Generation, Request, Sampling, Text
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm_backends.contract import Backend, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.gguf_header import NativeHeader
from localllm_backends.llamacpp.trained_drafter import KINDS


def _chat(*turns: str) -> str:
    roles = ("user", "assistant")
    body = "".join(f"<|im_start|>{roles[i % 2]}\n{t}<|im_end|>\n" for i, t in enumerate(turns))
    return body + "<|im_start|>assistant\n"


def prompt(kind: str, seed: int) -> str:
    """Return one prompt of a kind, different for every seed."""
    rng = random.Random(seed)
    thing = rng.choice(NAMES)
    if kind == "chat":
        return _chat(
            f"What should I know before I move to a town called {thing.title()} number {seed}? "
            "Tell me about it."
        )
    if kind == "story":
        return (
            f"Once upon a time, in the {rng.randrange(2, 90)} days of {thing}, there lived an old"
        )
    if kind == "code":
        return (
            f"# Sorts {thing} records by weight\nimport csv\n\nclass "
            f"{thing.title()}Table{seed}:\n    def __init__(self"
        )
    if kind == "json":
        return _chat(
            f"Describe {rng.randrange(3, 9)} kinds of {thing} as a JSON list with name, colour, "
            "weight and price."
        )
    return copy_edit(seed)


class Replay:
    """A clock that only the model's steps and guesses advance."""

    def __init__(self, backend: Backend, costs: list[float]) -> None:
        self.now_s, self._costs = 0.0, costs
        step, draft = backend.step, backend.draft

        def stepped(chunks: list[Chunk], *more: Any, **named: Any) -> Any:
            rows = sum(len(chunk.tokens) for chunk in chunks)
            self.now_s += 0.01 * float(np.interp(rows, (1, 2, 4, 8, 16, 32), self._costs))
            return step(chunks, *more, **named)

        def drafted(wanted: list[tuple[int, int, int]]) -> list[list[int]]:
            drafts = draft(wanted)
            # A head that stops because of low probability has computed one more token.
            computed = max(min(len(d) + 1, w[2]) for d, w in zip(drafts, wanted, strict=True))
            self.now_s += 0.01 * 0.08 * computed
            return drafts

        backend.step, backend.draft = stepped, drafted  # type: ignore[method-assign,assignment]


class Bench:
    """One engine with drafting on. Each request states whether it uses drafts."""

    def __init__(
        self, path: Path, draft: Path | None, *, cpu: bool = False, costs: list[float] | None = None
    ) -> None:
        threads = int(cpu)
        spec = LoadSpec(path=str(path), n_ctx=8192, n_seq_max=4, n_threads=threads)
        companion = draft is not None and NativeHeader(draft).text("general.architecture") in KINDS
        backend = backend_type.load(replace(spec, drafter=str(draft)) if companion else spec)
        small = (
            backend_type.load(replace(spec, path=str(draft))) if draft and not companion else None
        )
        settings = EngineSettings(
            cache_bytes=0, draft="auto", make_matcher=GrammarCompiler(backend)
        )
        self.clock = time.process_time if cpu else time.perf_counter
        if costs:
            replay = Replay(backend, costs)
            self.clock = lambda: replay.now_s
        self.engine = Engine(backend, settings, clock=self.clock, draft_backend=small)
        while self.engine.idle():
            pass
        self.outputs: dict[tuple[str, str], list[int]] = {}
        self.differing = 0

    def run(self, kind: str, streams: int, seed: int, mode: str, n: int) -> float:
        """Return the tokens/s of all streams together."""
        engine = self.engine
        for i in range(streams):
            greedy = Generation(Sampling(temperature=0.0), n, ignore_eos=True, cache_prompt=False)
            request = Request(f"{kind}-{seed}-{i}", "", greedy, draft=mode)
            engine.submit(request, engine.backend.tokenize(prompt(kind, seed * 31 + i)))
        started: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        counted = 0
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Text):
                    started.setdefault(event.id, self.clock())
                    tokens.setdefault(event.id, []).extend(event.tokens)
                    counted += len(event.tokens) if len(started) == streams else 0
                assert not isinstance(event, Finish) or event.reason == "length", event
        seconds = self.clock() - max(started.values())
        for key, said in tokens.items():
            other = self.outputs.setdefault((key, str(n)), said)
            self.differing += other != said
        return counted / seconds


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft")
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--only", default="chat,story,code,json,copy")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--costs", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    named = {"smollm2": smollm2, "gemma": gemma}
    path = named[options.model]() if options.model in named else Path(options.model)
    costs = [float(cost) for cost in options.costs.split(",") if cost]
    bench = Bench(
        path, Path(options.draft) if options.draft else None, cpu=options.cpu, costs=costs
    )
    results = []
    for streams in map(int, options.streams.split(",")):
        for kind in options.only.split(","):
            comparison = RoundComparison(f"{kind}, {streams} stream(s)", "tok/s")
            n = 320 if kind == "copy" else options.tokens
            seeds = iter(range(1000))

            def once(
                kind: str = kind,
                streams: int = streams,
                n: int = n,
                to: RoundComparison = comparison,
            ) -> None:
                seed = next(seeds)  # noqa: B023 - used at once
                for mode in ("off", "auto") if seed % 2 else ("auto", "off"):
                    to.add(mode, bench.run(kind, streams, seed, mode, n))

            interleave(options.rounds, once)
            results.append(comparison)
    figures = bench.engine.snapshot()
    print(
        {
            k: round(v, 3) if isinstance(v, float) else v
            for k, v in figures.items()
            if "draft" in k or "verify" in k
        }
    )
    print(f"answers that differed between off and auto: {bench.differing}")
    bench.engine.close()
    report(results, "auto", options.out)


if __name__ == "__main__":
    main()
