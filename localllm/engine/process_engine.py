"""A model loaded in a process of its own: what the text worker's and the embedding worker's engine have in common."""

from __future__ import annotations

from typing import Any

from localllm.engine.pipe import JsonProcess
from localllm_backends.contract import ModelInfo


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

    async def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. An embedding model sets its own marks around it, whatever is asked for."""
        message = {"op": "tokenize", "text": text, "special": special, "add_bos": add_bos}
        tokens: list[int] = await self._process.ask(message)
        return tokens

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of `tokens`."""
        text: str = await self._process.ask({"op": "detokenize", "tokens": tokens})
        return text

    async def close(self) -> None:
        """End the process: it finishes its step, frees the model, and is killed if it takes too long."""
        await self._process.close()
