"""Compare how far a request's log-probabilities depend on its batch with the limits in
docs/api/sampling.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from engine.drive import GREEDY, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Request, TokenLogprob
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for

DOCS = Path(__file__).parents[2] / "docs" / "api" / "sampling.md"
QUESTIONS = (
    "Name three colours and say why.",
    "What is a lighthouse for?",
    "Count to five.",
    "Who was Ada Lovelace?",
)
SYSTEM = "You are a helpful assistant who answers in a few plain words. " * 6


def asked(question: str, *, key: str, shares: bool) -> Request:
    prompt = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    return request_for(
        key + question, prompt, 16, GREEDY, ignore_eos=True, logprobs=5, cache_prompt=shares
    )


def moved(one: list[TokenLogprob], other: list[TokenLogprob]) -> Iterator[float]:
    """Yield the change of each log-probability that both runs list, up to the first token that
    differs."""
    for mine, theirs in zip(one, other, strict=True):
        had = {token: logprob for _, token, logprob in mine.top}
        yield from (abs(lp - had[token]) for _, token, lp in theirs.top if token in had)
        if mine.token != theirs.token:
            return


def answers(
    engine: Engine, key: str, *, shares: bool = True, together: bool = False
) -> list[list[TokenLogprob]]:
    requests = [asked(question, key=key, shares=shares) for question in QUESTIONS]
    if together:
        outcome = run(engine, *requests)
        return [outcome.logprobs[r.id] for r in requests]
    return [run(engine, r).logprobs[r.id] for r in requests]


def test_log_probabilities_move_no_further_than_the_docs_say(smollm2: Path, tmp_path: Path) -> None:
    def started() -> Engine:
        settings = EngineSettings(disk_dir=str(tmp_path), disk_bytes=10**9)
        return Engine(llamacpp.load(LoadSpec(str(smollm2), n_ctx=4096, n_seq_max=8)), settings)

    engine = started()
    alone = answers(engine, "first", shares=False)
    said = {
        "alone": answers(engine, "again", shares=False),
        "with three others": answers(engine, "beside", shares=False, together=True),
    }
    answers(engine, "cold")
    said["from the cache in memory"] = answers(engine, "warm")
    assert engine.metrics.cached_tokens > 60 * len(QUESTIONS)
    engine.close()
    engine = started()
    said["from the cache on disk"] = answers(engine, "restored")
    assert engine.metrics.cached_tokens > 60 * len(QUESTIONS)
    engine.close()
    for what, others in said.items():
        row = re.search(rf"\| [^|]*{what}[^|]* \| ([\d.]+) \| ([\d.]+) \|", DOCS.read_text("utf-8"))
        assert row is not None, what
        assert float(row[1]) <= float(row[2])
        most = max(max(moved(a, b)) for a, b in zip(alone, others, strict=True))
        assert most <= float(row[2]), what
