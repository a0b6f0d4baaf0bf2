"""One model in a worker of its own, and the times of one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.engine.messages import Finish, Request
    from localllm.engine.worker.client import WorkerClient, WorkerOptions


@dataclass(frozen=True, slots=True)
class Timed:
    """Rates in tokens/s after and before the first token (0: nothing of the prompt had to be read),
    that token's time in seconds, how many prompt tokens were known, and the seconds of decoding."""

    decode_tok_s: float
    prefill_tok_s: float
    ttft_s: float
    cached_tokens: int
    decode_s: float


def prompt_of(engine: WorkerClient, seed: int, n: int) -> list[int]:
    """`n` tokens of this model's vocabulary, others for every seed."""
    return [5 + (seed * 7919 + i * 104729) % (engine.info.n_vocab - 10) for i in range(n)]


@asynccontextmanager
async def loaded(options: WorkerOptions) -> AsyncIterator[WorkerClient]:
    """The model in a worker of its own, for as long as the block runs."""
    from localllm.engine.worker.supervisor import Supervisor

    supervisor = Supervisor(options)
    try:
        yield await supervisor.engine()
    finally:
        await supervisor.close()


async def finished(engine: WorkerClient, request: Request) -> Finish:
    """How the request ended. Raises the LocalLLMError that it ended in."""
    from localllm.engine.messages import Failure
    from localllm.errors import by_code

    end = await engine.listen(request, lambda _: None)
    if isinstance(end, Failure):
        raise by_code(end.code, end.message, hint=end.hint)
    return end


async def answer(
    engine: WorkerClient, name: str, prompt: list[int], n: int, *, cache: bool = False
) -> Timed:
    """`n` tokens behind `prompt`, without drafting. Raises the LocalLLMError that it ended in."""
    from localllm.engine.messages import Generation, Request, Sampling

    greedy = Generation(Sampling(temperature=0.0), n, ignore_eos=True, cache_prompt=cache)
    finish = await finished(engine, Request(f"bench-{name}", prompt, greedy, draft="off"))
    times, usage = finish.timings, finish.usage
    read = len(prompt) - usage.cached_tokens
    return Timed(
        (usage.completion_tokens - 1) / times.decode_s if times.decode_s else 0.0,
        read / times.prefill_s if times.prefill_s else 0.0,
        times.ttft_s,
        usage.cached_tokens,
        times.decode_s,
    )


def second_fastest(rates: Sequence[float]) -> float:
    """Of three rounds the median; of more, what the machine does when left alone, without the one
    lucky round."""
    return sorted(rates)[-2:][0]
