"""What `localllm bench --speculation` measures: decoding with drafting off and on, in turn, on
prose and on an edit."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from localllm.bench.ratio import rotated
from localllm.bench.scenarios import NAMES, source_file
from localllm.cli.bench.timing import finished
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.worker.client import WorkerClient

WORKLOADS = ("prose", "copy-edit")
MODES = ("off", "auto")
TOKENS = {"prose": 96, "copy-edit": 192}
# Greedy prose of a small model runs in circles, which drafts copy: a penalty over the whole answer
# keeps it prose.
_PENALTY = {"prose": 1.1, "copy-edit": 1.0}
# The engine times its verification steps while nobody asks; it allows itself a second for that.
_PROBE_WAIT_S, _PROBE_LOOK_S = 2.0, 0.05
FUNCTIONS = 11  # about 400 tokens


@dataclass
class Runs:
    """The rounds of one workload: tokens/s by mode, and what became of the drafted tokens."""

    tok_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    accepted: int = 0
    rejected: int = 0

    def to_json(self, workload: str) -> dict[str, Any]:
        """Medians in tokens/s, their ratio as `gain`, and the accepted share of drafted tokens
        (None: none drafted)."""
        off, auto = (statistics.median(self.tok_s[mode]) for mode in MODES)
        drafted = self.accepted + self.rejected
        return {
            "workload": workload,
            "off_tok_s": off,
            "auto_tok_s": auto,
            "gain": auto / off,
            "accepted_draft_tokens": self.accepted,
            "rejected_draft_tokens": self.rejected,
            "acceptance": self.accepted / drafted if drafted else None,
        }


def prompt(workload: str, seed: int, functions: int = FUNCTIONS) -> str:
    """Text to continue, another for every seed: the engine drafts from its latest answers too, so
    none may recur."""
    rng = random.Random(seed)
    if workload == "prose":
        first, second = rng.sample(NAMES, 2)
        return (
            f"Letter {seed}, written in the {rng.randrange(2, 90)}th year of the {first} people. "
            "Dear friend, let me "
            f"tell you how we travelled from the old {second} to the coast, whom we met, and what "
            "they told us. First,"
        )
    text = source_file(seed, functions)
    # The copy is begun for the model: a small one asked in words writes something else.
    head = "\n".join(text.splitlines()[:5]).replace("limit", "maximum", 1)
    return f"The file:\n{text}\nThe same file, `limit` renamed once:\n{head}\n"


async def measure(engine: WorkerClient, rounds: int) -> dict[str, Any]:
    """Figures of every workload, `rounds` times with drafting off and on, the first of the two
    taking turns.

    `state` is "on", or why this engine drafts nothing (then nothing is measured). Raises the
    LocalLLMError a request ended in, UsageError where the context is too short.
    """
    state = str((await engine.snapshot()).get("speculation", "on"))
    if state != "on":
        return {"state": state, "rounds": 0, "workloads": []}
    seed = 0
    for workload in WORKLOADS:
        await _decode(engine, workload, seed, "off")
        seed += 1
    await _probed(engine)
    found = []
    for workload in WORKLOADS:
        runs = Runs()
        for turn in range(rounds):
            for mode in rotated(MODES, turn):
                rate, accepted, rejected = await _decode(engine, workload, seed, mode)
                runs.tok_s[mode].append(rate)
                runs.accepted += accepted
                runs.rejected += rejected
                seed += 1
        found.append(runs.to_json(workload))
    return {"state": state, "rounds": rounds, "workloads": found}


async def _probed(engine: WorkerClient) -> None:
    """Wait until the engine knows what verifying costs here: the figure settles once it was
    timed."""
    before = (await engine.snapshot()).get("verify_8_cost")
    for _ in range(round(_PROBE_WAIT_S / _PROBE_LOOK_S)):
        await asyncio.sleep(_PROBE_LOOK_S)
        if (await engine.snapshot()).get("verify_8_cost") != before:
            return


async def _decode(
    engine: WorkerClient, workload: str, seed: int, mode: str
) -> tuple[float, int, int]:
    """(tokens/s, accepted, rejected drafted tokens) of one greedy request."""
    from localllm.engine.messages import Generation, Request, Sampling

    tokens, n = await _fitting(engine, workload, seed)
    sampling = Sampling(
        temperature=0.0, repeat_penalty=_PENALTY[workload], repeat_last_n=TOKENS[workload]
    )
    generation = Generation(sampling, n, ignore_eos=True, cache_prompt=False)
    finish = await finished(
        engine, Request(f"bench-{workload}-{seed}", tokens, generation, draft=mode)
    )
    usage = finish.usage
    rate = (usage.completion_tokens - 1) / finish.timings.decode_s
    return rate, usage.accepted_draft_tokens, usage.rejected_draft_tokens


async def _fitting(engine: WorkerClient, workload: str, seed: int) -> tuple[list[int], int]:
    """The prompt's tokens and how many to generate; a shorter file where the context is short."""
    n = TOKENS[workload]
    for functions in range(FUNCTIONS, 1, -1):
        tokens = await engine.tokenize(prompt(workload, seed, functions), add_bos=True)
        share = n * functions // FUNCTIONS
        if len(tokens) + share <= engine.info.n_ctx:
            return tokens, share
    raise UsageError(
        f"a context of {engine.info.n_ctx:,} tokens is too short to measure drafting",
        hint="give --context 1024",
    )


def table(figures: dict[str, Any]) -> list[str]:
    """The figures as lines of at most 80 columns."""
    if figures["state"] != "on":
        return [f"drafting  not measured: {figures['state']}"]
    lines = [f"{'drafting':<10}{'off':>8}{'auto':>9} tok/s   gain   drafts accepted"]
    for row in figures["workloads"]:
        drafted = row["accepted_draft_tokens"] + row["rejected_draft_tokens"]
        share = (
            f"{row['acceptance']:.0%} of {drafted}"
            if row["acceptance"] is not None
            else ("none tried")
        )
        lines.append(
            f"{row['workload']:<10}{row['off_tok_s']:>8.1f}{row['auto_tok_s']:>9.1f}       "
            f"{row['gain']:5.2f}×   {share}"
        )
    return lines
