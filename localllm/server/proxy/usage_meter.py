"""What an answer of another server cost whoever asked: by the usage it states, and by a count where it states none.

Streams of OpenAI's chat state no usage unless the client asks for it, and a client may leave before the end: counted by
statements alone, such requests would cost nothing of a key's limit.
"""

from __future__ import annotations

import re
from typing import Any

from localllm.server.http.accounts import Account, caller

_TAIL_BYTES = 8192
# Of every dialect: OpenAI's, Responses' and Anthropic's, Ollama's, llama.cpp's.
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count|tokens_evaluated)"\s*:\s*(\d{1,12})')
_WRITTEN = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count|tokens_predicted)"\s*:\s*(\d{1,12})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
# Anthropic's count of a prompt leaves out what came from the cache and what went there.
_BESIDE = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,12})')
_STORED = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,12})')
_HINTS = (b"_tokens", b"eval_count", b"tokens_")
# Where a prompt was never counted: characters of text per token, as English has them.
_CHARACTERS_PER_TOKEN = 4
# These answer with a count, and compute nothing.
_COUNTING = ("count_tokens", "input_tokens", "tokenize", "apply-template")


class Meter:
    """Counts one request for `account`, over however many servers it is tried at. `asked`: tokens its prompt is about, for
    an answer that states none."""

    def __init__(self, account: Account, asked: int) -> None:
        self._account, self._asked = account, asked
        self._tail = b""
        self._charged = [0, 0, 0]
        self._frames = 0
        self._streams = False
        self._refused = False

    def begun(self, status: int, *, streams: bool) -> None:
        """A server answers with that status, and piece by piece or not: one that refuses costs nothing."""
        self._refused, self._streams = status >= 400, streams
        self._tail, self._frames = b"", 0

    def failed(self) -> None:
        """No server answered."""
        self._refused = True

    def hear(self, piece: bytes) -> None:
        """The next piece of the answer's body."""
        if self._streams:
            self._frames += piece.count(b"data:") or piece.count(b"\n")
        said = self._tail + piece
        self._tail = said[-_TAIL_BYTES:]
        if self._refused or not any(hint in said for hint in _HINTS):
            return
        prompt, written, cached, beside, stored = (
            _last(p, said) for p in (_PROMPT, _WRITTEN, _CACHED, _BESIDE, _STORED)
        )
        self._charge(prompt + beside + stored if prompt else 0, cached or beside, written)

    def _charge(self, *found: int) -> None:
        # Only what is new: a usage that grows in a stream, or is stated again elsewhere, is charged once.
        more = [max(0, now - before) for now, before in zip(found, self._charged, strict=True)]
        if any(more):
            self._charged = [max(a, b) for a, b in zip(found, self._charged, strict=True)]
            self._account.charge(*more)

    def close(self, *, left: bool = False) -> None:
        """The request is over; `left`: its client did not wait for the end. What was not stated is charged as it was
        counted: the prompt by its length, a stream by its frames, of which each has a token or more."""
        if self._refused:
            return
        prompt, cached, written = self._charged
        counted = max(written, self._frames) if left else written or self._frames
        self._charge(prompt or self._asked, cached, counted)


def _last(pattern: re.Pattern[bytes], said: bytes) -> int:
    found = pattern.findall(said)
    return int(found[-1]) if found else 0


def meter_of(path: str, asked: dict[str, Any]) -> Meter | None:
    """What counts a request for `path` with the body `asked`; None where nobody counts: for a caller without a name, and
    where nothing is computed."""
    account = caller()
    if not account.name or path.rstrip("/").endswith(_COUNTING):
        return None
    texts = (asked.get(k) for k in ("messages", "input", "prompt", "system", "instructions", "tools"))
    return Meter(account, sum(map(_characters, texts)) // _CHARACTERS_PER_TOKEN)


def _characters(value: object) -> int:
    """Characters of text in a part of a body; pictures sent as text are none."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(_characters(v) for k, v in value.items() if k not in ("data", "images"))
    return _CHARACTERS_PER_TOKEN if isinstance(value, int) else 0
