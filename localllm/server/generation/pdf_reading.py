"""Replaces the PDFs of a conversation with their text and, for vision models, with images of their
pages."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.conversation import documents, images, pdf
from localllm.conversation.documents import AttachedPdf
from localllm.conversation.pdf import Pdf
from localllm.errors import UnsupportedError
from localllm.server.generation.chat import ChatRequest
from localllm.server.http.accounts import caller
from localllm.server.http.recent import RecentlyUsed

# Child processes that run at the same time, one core each.
_MAX_PARALLEL = 2
_MAX_PDFS = 16
# A conversation sends its PDFs again with every turn.
_CACHE_BYTES = 64 * 2**20
_CACHED_PDFS = 4096


def _empty_cache() -> RecentlyUsed[tuple[bytes, bool], Pdf]:
    return RecentlyUsed(_CACHED_PDFS, _CACHE_BYTES, _size)


def _free_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(_MAX_PARALLEL)


@dataclass
class PdfReader:
    """Reads PDFs in child processes, with a cache."""

    _cache: RecentlyUsed[tuple[bytes, bool], Pdf] = field(default_factory=_empty_cache)
    _slots: asyncio.Semaphore = field(default_factory=_free_slots)

    async def read(self, chat: ChatRequest, *, vision: bool) -> ChatRequest:
        """`chat` with its PDFs as text. If the model has vision (`vision`), pages without text
        become images.

        Raises UnsupportedError if a PDF in the newest turn can't be read. In earlier turns a note
        replaces it.
        """
        omitted: list[str] = []
        messages = []
        left = _MAX_PDFS
        for message in chat.messages:
            plain = dict(message)
            for attached in plain.pop("pdfs", ()):
                left -= 1
                if left >= 0:
                    found = await self._pdf(attached, vision=vision)
                else:
                    found = Pdf(problem=f"{_MAX_PDFS} PDFs are the limit")
                if found.problem and attached.in_question:
                    problem = f"{attached.where}: {found.problem}"
                    raise UnsupportedError(
                        problem,
                        param=attached.where,
                        hint="send the text of the PDF, or images of its pages",
                    )
                if found.problem:
                    omitted.append(f"messages.{attached.kind}")
                plain = _with(plain, attached, found)
            messages.append(plain)
        return replace(chat, messages=messages, omitted=(*chat.omitted, *dict.fromkeys(omitted)))

    async def _pdf(self, attached: AttachedPdf, *, vision: bool) -> Pdf:
        # Otherwise the time would tell whether another key has sent the same file.
        scope = caller().cache_scope.encode()
        key = hashlib.sha256(scope + b"\0" + attached.data).digest(), vision
        known = self._cache.get(key)
        if known is not None:
            return known
        if not pdf.installed():
            return Pdf(problem=pdf.MISSING)
        async with self._slots:
            return self._cache.put(
                key, await asyncio.to_thread(pdf.read, attached.data, pictures=vision)
            )


def _size(found: Pdf) -> int:
    return sum(len(page.text) + len(page.picture) for page in found.pages)


def _with(message: Mapping[str, Any], attached: AttachedPdf, found: Pdf) -> dict[str, Any]:
    """`message` with the PDF's mark replaced by its content."""
    if found.problem:
        return {
            **message,
            "content": message["content"].replace(
                attached.mark, f"[file omitted: {found.problem}]", 1
            ),
        }
    all_images = list(message.get("images", ()))
    parts = []
    pictures = []
    for i, page in enumerate(found.pages):
        if page.picture:
            picture = images.attached_image(
                page.picture, f"{attached.where}.page[{i}]", in_question=attached.in_question
            )
            pictures.append(picture)
            parts.append(picture.mark)
        else:
            parts.append(page.text or "[a page without text]")
    if len(parts) > 1:
        parts = [f"Page {i + 1}:\n{part}" for i, part in enumerate(parts)]
    text = documents.fenced(attached.name, "\n\n".join(parts))
    filled = {**message, "content": message["content"].replace(attached.mark, text, 1)}
    if all_images or pictures:
        return {**filled, "images": [*all_images, *pictures]}
    return filled
