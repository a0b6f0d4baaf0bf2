"""One timed answer of an engine, as every part of `localllm bench` takes it: tokens no cache has seen, greedy, to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.engine.worker.client import WorkerClient


@dataclass(frozen=True, slots=True)
class Timed:
    """Rates in tokens/s after and before the first token (0: nothing of the prompt had to be read), that token's time in
    seconds, how many prompt tokens were known, and the seconds of decoding."""

    decode_tok_s: float
    prefill_tok_s: float
    ttft_s: float
    cached_tokens: int
    decode_s: float


def prompt_of(engine: WorkerClient, seed: int, n: int) -> list[int]:
    """`n` tokens of this model's vocabulary, others for every seed."""
    return [5 + (seed * 7919 + i * 104729) % (engine.info.n_vocab - 10) for i in range(n)]


async def answer(engine: WorkerClient, name: str, prompt: list[int], n: int, *, cache: bool = False) -> Timed:
    """`n` tokens behind `prompt`, without drafting. Raises the LocalLLMError that it ended in."""
    from localllm.engine.messages import Failure, Finish, Generation, Request, Sampling
    from localllm.errors import by_code

    greedy = Generation(Sampling(temperature=0.0), n, ignore_eos=True, cache_prompt=cache)
    async for event in engine.submit(Request(f"bench-{name}", prompt, greedy, draft="off")):
        if isinstance(event, Failure):
            raise by_code(event.code, event.message, hint=event.hint)
        if isinstance(event, Finish):
            t, usage = event.timings, event.usage
            read = len(prompt) - usage.cached_tokens
            return Timed(
                (usage.completion_tokens - 1) / t.decode_s if t.decode_s else 0.0,
                read / t.prefill_s if t.prefill_s else 0.0,
                t.ttft_s,
                usage.cached_tokens,
                t.decode_s,
            )
    raise by_code("backend_error", "the measurement ended without a result")
