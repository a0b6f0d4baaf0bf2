"""A model loaded in a process of its own: what the text worker's and the embedding worker's engine have in common."""

from __future__ import annotations

import os
import sys
from typing import Any

from localllm.engine.worker.pipe import JsonProcess
from localllm.engine.worker.watchdog import Pulse
from localllm_backends.contract import ModelInfo

# GNU OpenMP's threads spin for milliseconds while they wait for each other, by default: harmless on an idle machine,
# ruinous when anybody else needs a core. Measured with SmolLM2 on two cores: with 1,000 turns decode is as fast as ever
# alone (0.93 of a bare loop through HTTP) and 42 tok/s beside one busy process, where the default falls to 8; with 300
# it is 50, but 0.88 through HTTP; sleeping at once costs 60 % alone.
# Every thread that allocates gets a heap of its own, and every sliced prefill is a thread: over 1,500 mixed requests the worker grew
# by 10 %, with two heaps for all by 0.2 % (mallopt(3), M_ARENA_MAX).
_WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "MALLOC_ARENA_MAX": "2"}
# Large allocations (weights that are laid out anew, KV, buffers) ask Linux for pages of 2 MiB, where it gives them only to
# who asks (transparent_hugepage/enabled is `madvise` on most distributions). Measured with llama-bench, with and without in
# turn: gpt-oss-20b is loaded in 6.6 and 7.5 s for 12.7 and 29.2, since 2.5 million page faults are 5,000; 8B Q4 decodes 5 to
# 12 % faster, as fewer translations of addresses are missed. glibc's tunable, unknown to other C libraries.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# With pages of 64 KiB (some ARM kernels) a huge one has 512 MiB, and whoever touches a byte of it pays for them all.
_USUAL_PAGE_BYTES = 4096


def worker_environment() -> dict[str, str]:
    """The environment of every worker: this process's, and what native code reads there unless somebody chose it."""
    huge = _HUGE_PAGES if sys.platform == "linux" and os.sysconf("SC_PAGE_SIZE") == _USUAL_PAGE_BYTES else {}
    return {**_WORKER_ENVIRONMENT, **huge, **os.environ}


class ProcessEngine:
    """Asks `process`, which said `ready`. `finished` counts the requests it has answered."""

    def __init__(self, process: JsonProcess, ready: dict[str, Any]) -> None:
        facts = ready["ready"]
        self._process = process
        self.info = ModelInfo(**{**facts, "eog_tokens": tuple(facts["eog_tokens"])})
        self.finished = 0

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return not self._process.ended

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    async def tokenize(
        self, text: str, *, special: bool = True, add_bos: bool = False, images: dict[str, str] | None = None
    ) -> list[int]:
        """Token ids of `text`, whose marks stand for `images` (base64); an image's are below zero. An embedding model
        sets its own marks around it, whatever is asked for."""
        message = {"op": "tokenize", "text": text, "special": special, "add_bos": add_bos}
        if images:
            message["images"] = images
        tokens: list[int] = await self._process.ask(message)
        return tokens

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of `tokens`."""
        text: str = await self._process.ask({"op": "detokenize", "tokens": tokens})
        return text

    @property
    def awaited(self) -> bool:
        """True while somebody waits for an answer."""
        return self._process.awaited

    async def pulse(self) -> Pulse:
        """What the process says of itself. This one answers questions one by one: when it answers, it is at no other."""
        await self.tokenize("")
        return Pulse(0.0)

    def condemn(self, why: str) -> None:
        """End a process that hangs; whoever waits is told `why`."""
        self._process.condemn(why)

    async def close(self) -> None:
        """End the process: it finishes its step, frees the model, and is killed if it takes too long."""
        await self._process.close()
