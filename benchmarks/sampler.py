"""What a sampled token costs at 262,144 tokens, with each filter, on rows with words that stand out and on flat ones.

python -m benchmarks sampler [--rounds 40] [--vocabulary 262144]

Milliseconds of CPU time of this thread: median and least. The bars: 0.20 where top_k is at most 512, else 0.70.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling.sampler import Sampler, TokenRules

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SETTINGS = {
    "greedy": replace(OPEN, temperature=0.0),
    "greedy, repeat 1.1 over all": replace(OPEN, temperature=0.0, repeat_penalty=1.1, repeat_last_n=-1),
    "defaults": Sampling(),
    "Qwen (T .7, k 20, p .8)": Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.0),
    "Gemma (k 64, p .95)": replace(OPEN, top_k=64, top_p=0.95),
    "top_k 512": replace(OPEN, top_k=512),
    "top_k 40, typical_p": Sampling(top_k=40, typical_p=0.9),
    "top_k 40, XTC": Sampling(xtc_probability=0.5),
    "defaults, DRY over all": Sampling(dry_multiplier=0.8, dry_penalty_last_n=-1),
    "defaults, repeat 1.1": Sampling(repeat_penalty=1.1),
    "defaults, repeat 1.1 over all": Sampling(repeat_penalty=1.1, repeat_last_n=-1),
    "none (gpt-oss)": OPEN,
    "none, T .7": replace(OPEN, temperature=0.7),
    "min_p": replace(OPEN, min_p=0.05),
    "top_p": replace(OPEN, top_p=0.95),
    "top_p, min_p": replace(OPEN, top_p=0.95, min_p=0.05),
    "top_p, T .7": replace(OPEN, top_p=0.95, temperature=0.7),
    "top_p .3": replace(OPEN, top_p=0.3),
    "typical_p": replace(OPEN, typical_p=0.9),
    "typical_p, T .7": replace(OPEN, typical_p=0.9, temperature=0.7),
    "XTC": replace(OPEN, xtc_probability=0.5),
    "XTC, T .7": replace(OPEN, xtc_probability=0.5, temperature=0.7),
    "DRY over all": replace(OPEN, dry_multiplier=0.8, dry_penalty_last_n=-1),
    "repeat 1.1 over all": replace(OPEN, repeat_penalty=1.1, repeat_last_n=-1),
    "top_p, repeat 1.1 over all": replace(OPEN, top_p=0.95, repeat_penalty=1.1, repeat_last_n=-1),
    "presence and frequency": replace(OPEN, presence_penalty=0.5, frequency_penalty=0.2),
    "logit_bias": replace(OPEN, logit_bias={5: 1.0, 9: -100.0}),
    "top_k 20000": replace(OPEN, top_k=20_000),
}
HISTORY_TOKENS = 20_000


def row_of(n_vocab: int, rng: np.random.Generator, *, peaked: bool) -> NDArray[np.float32]:
    """Logits as models have them: most of them noise, and some dozens of words that would do."""
    row = rng.normal(0.0, 2.2, n_vocab).astype(np.float32)
    if peaked:
        row[rng.integers(0, n_vocab, 40)] += np.linspace(18, 6, 40).astype(np.float32)
    return row


def spent_ms(run: Callable[[], object], times: int) -> list[float]:
    """The thread's own milliseconds of each of so many runs."""
    spent = []
    for _ in range(times):
        started = time.thread_time_ns()
        run()
        spent.append((time.thread_time_ns() - started) / 1e6)
    return spent


def median_ms(run: Callable[[], object], times: int) -> float:
    """Median of the thread's own milliseconds."""
    return statistics.median(spent_ms(run, times))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--vocabulary", type=int, default=262_144)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    history = rng.integers(3, 49_000, HISTORY_TOKENS).tolist()
    rows = [[row_of(args.vocabulary, rng, peaked=peaked) for _ in range(4)] for peaked in (True, False)]
    print(f"{'ms a token, median (least)':32} {'peaked':>15} {'flat':>15}")
    for name, sampling in SETTINGS.items():
        sampler = Sampler(sampling, None, TokenRules(text=lambda token: b"w%d " % token))
        line = f"{name:32}"
        for same in rows:
            sampler.choose(same[0], history)
            following = itertools.cycle(same)
            spent = spent_ms(lambda s=sampler, f=following: s.choose(next(f), history), 4 * args.rounds)  # type: ignore[misc]
            line += f" {statistics.median(spent):7.3f} ({min(spent):.3f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
