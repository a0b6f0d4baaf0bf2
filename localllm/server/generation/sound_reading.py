"""Decodes the sounds of a conversation for a model that hears."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from localllm.conversation import sounds
from localllm.conversation.sounds import AttachedSound, Sound
from localllm.errors import RequestError, UnsupportedError
from localllm.server.generation.chat import ChatRequest
from localllm.server.http.accounts import caller
from localllm.server.http.recent import RecentlyUsed

# Child processes that run at the same time, one core each.
_MAX_PARALLEL = 2
_MAX_SOUNDS = 16
# A conversation sends its sounds again with every turn.
_CACHE_BYTES = 128 * 2**20
_CACHED_SOUNDS = 1024


def _size(found: Sound) -> int:
    return len(found.samples)


def _empty_cache() -> RecentlyUsed[tuple[bytes, int], Sound]:
    return RecentlyUsed(_CACHED_SOUNDS, _CACHE_BYTES, _size)


def _free_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(_MAX_PARALLEL)


@dataclass(frozen=True, slots=True)
class AudioSupport:
    """Whether a model hears.

    - `model`: its name.
    - `rate_hz`: samples per second that it needs; 0 if it does not hear.
    - `other_models`: installed models that hear.
    """

    model: str
    rate_hz: int
    other_models: Sequence[str] = ()


def no_audio_error(where: str, hearing: AudioSupport) -> UnsupportedError:
    """The error for a sound that the model can't hear."""
    hint = (
        "`localllm recommend --hears` lists models that do; a projector file must be in the "
        "model's folder"
    )
    if hearing.other_models:
        hint = f"{hearing.other_models[0]} is installed here and supports audio"
    return UnsupportedError(
        f"{where}: {hearing.model} does not support audio", param=where, hint=hint
    )


@dataclass
class SoundReader:
    """Decodes sounds in child processes, with a cache."""

    _cache: RecentlyUsed[tuple[bytes, int], Sound] = field(default_factory=_empty_cache)
    _slots: asyncio.Semaphore = field(default_factory=_free_slots)

    async def read(self, chat: ChatRequest, hearing: AudioSupport) -> ChatRequest:
        """`chat` with its sounds decoded.

        A sound that can't be read raises UnsupportedError or RequestError in the turn to be
        answered. In earlier turns a note replaces it.
        """
        if not any(message.get("sounds") for message in chat.messages):
            return chat
        omitted: list[str] = []
        messages = []
        left = _MAX_SOUNDS
        for message in chat.messages:
            plain = dict(message)
            decoded = []
            for attached in plain.pop("sounds", ()):
                left -= 1
                if hearing.rate_hz and left < 0:
                    problem = f"a conversation may have {_MAX_SOUNDS} sounds at most"
                    attached = replace(attached, problem=problem)
                found = await self.decoded(attached, hearing)
                if found.problem:
                    omitted = ["messages.audio"]
                    plain["content"] = plain["content"].replace(attached.mark, _note(found), 1)
                else:
                    decoded.append(found)
            if decoded:
                plain["sounds"] = decoded
            messages.append(plain)
        return replace(chat, messages=messages, omitted=(*chat.omitted, *omitted))

    async def decoded(self, attached: AttachedSound, hearing: AudioSupport) -> AttachedSound:
        """`attached` with its samples, or with a problem if it belongs to an earlier turn.

        Raises UnsupportedError or RequestError otherwise.
        """
        if not hearing.rate_hz:
            if attached.in_question:
                raise no_audio_error(attached.where, hearing)
            return replace(attached, problem=sounds.NOTE)
        found = Sound(problem=attached.problem)
        if not attached.problem:
            found = await self._sound(attached.data, hearing.rate_hz)
        if found.problem and attached.in_question:
            raise RequestError(f"{attached.where}: {found.problem}", param=attached.where)
        return replace(attached, samples=found.samples, problem=found.problem)

    async def _sound(self, data: bytes, rate_hz: int) -> Sound:
        # Otherwise the time would tell whether another key has sent the same file.
        scope = caller().cache_scope.encode()
        key = hashlib.sha256(scope + b"\0" + data).digest(), rate_hz
        known = self._cache.get(key)
        if known is not None:
            return known
        if not sounds.installed():
            return Sound(problem=sounds.MISSING)
        async with self._slots:
            return self._cache.put(key, await asyncio.to_thread(sounds.decode, data, rate_hz))


def _note(sound: AttachedSound) -> str:
    if sound.problem == sounds.NOTE:
        return sounds.NOTE
    return f"[audio omitted: {sound.problem}]"
