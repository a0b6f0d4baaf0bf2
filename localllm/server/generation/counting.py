"""How many tokens a text with images has: an engine's own count, told of the images that the marks in the text stand for."""

from __future__ import annotations

from typing import Any

from localllm.engine.worker.api import EngineClient


class WithImages:
    """An engine whose `tokenize` knows the images of one conversation; `files` in base64, by their marks."""

    def __init__(self, engine: EngineClient, files: dict[str, str]) -> None:
        self._engine, self._files = engine, files
        self.info = engine.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def tokenize(
        self, text: str, *, special: bool = True, add_bos: bool = False, images: dict[str, str] | None = None
    ) -> list[int]:
        """Token ids of `text`, with those of the images that it has."""
        there = images or {mark: file for mark, file in self._files.items() if mark in text}
        if not there:
            return await self._engine.tokenize(text, special=special, add_bos=add_bos)
        return await self._engine.tokenize(text, special=special, add_bos=add_bos, images=there)
