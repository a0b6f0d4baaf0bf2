"""Counts the tokens of a proxied answer against the caller's key: by the usage it reports, else by
an estimate.

OpenAI streams report usage only on request, and a client may disconnect before the end: without an
estimate such requests would be free.
"""

from __future__ import annotations

import re
from typing import Any

from localllm.server.http.accounts import Account, caller

_TAIL_BYTES = 8192
# Of every dialect: OpenAI's, Responses' and Anthropic's, Ollama's, llama.cpp's.
_PROMPT = re.compile(
    rb'"(?:prompt_tokens|input_tokens|prompt_eval_count|tokens_evaluated)"\s*:\s*(\d{1,12})'
)
_WRITTEN = re.compile(
    rb'"(?:completion_tokens|output_tokens|eval_count|tokens_predicted)"\s*:\s*(\d{1,12})'
)
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
# Anthropic's input_tokens excludes cache reads and writes.
_CACHE_READ = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,12})')
_CACHE_WRITTEN = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,12})')
_HINTS = (b"_tokens", b"eval_count", b"tokens_")
# The estimate for a prompt that was never counted: about English.
_CHARACTERS_PER_TOKEN = 4
# These paths count tokens and compute nothing.
_COUNTING = ("count_tokens", "input_tokens", "tokenize", "apply-template")


class UsageMeter:
    """Counts one request for `account`, over however many nodes it is tried on; without an account
    it counts nothing.
    `prompt_estimate`: tokens of the prompt, for an answer that reports none."""

    def __init__(self, account: Account | None = None, prompt_estimate: int = 0) -> None:
        self._account, self._prompt_estimate = account, prompt_estimate
        self._tail = b""
        self._charged = [0, 0, 0]
        self._frames = 0
        self._streams = False
        self._refused = False

    def begin(self, status: int, *, streams: bool) -> None:
        """An answer begins; an error status costs nothing."""
        self._refused, self._streams = status >= 400, streams
        self._tail, self._frames = b"", 0

    def fail(self) -> None:
        self._refused = True

    def feed(self, piece: bytes) -> None:
        if self._account is None:
            return
        if self._streams:
            self._frames += piece.count(b"data:") or piece.count(b"\n")
        seen = self._tail + piece
        self._tail = seen[-_TAIL_BYTES:]
        if self._refused or not any(hint in seen for hint in _HINTS):
            return
        prompt, written, cached, cache_read, cache_written = (
            _last(p, seen) for p in (_PROMPT, _WRITTEN, _CACHED, _CACHE_READ, _CACHE_WRITTEN)
        )
        self._charge(
            prompt + cache_read + cache_written if prompt else 0, cached or cache_read, written
        )

    def _charge(self, *counts: int) -> None:
        # Usage that grows in a stream, or is repeated on another node, is charged once.
        new = [max(0, now - before) for now, before in zip(counts, self._charged, strict=True)]
        if self._account is not None and any(new):
            self._charged = [max(a, b) for a, b in zip(counts, self._charged, strict=True)]
            self._account.charge(*new)

    def close(self, *, left: bool = False) -> None:
        """The request is over; `left`: the client disconnected early. What was not reported is
        charged by estimate: the prompt by its length, a stream by its frames, each of which has a
        token or more."""
        if self._refused:
            return
        prompt, cached, written = self._charged
        counted = max(written, self._frames) if left else written or self._frames
        self._charge(prompt or self._prompt_estimate, cached, counted)


def _last(pattern: re.Pattern[bytes], seen: bytes) -> int:
    counts = pattern.findall(seen)
    return int(counts[-1]) if counts else 0


def meter_for(path: str, body: dict[str, Any]) -> UsageMeter:
    """The meter for a request; one that counts nothing for a caller without a named key, and for
    paths that compute nothing."""
    account = caller()
    if not account.name or path.rstrip("/").endswith(_COUNTING):
        return UsageMeter()
    texts = (
        body.get(k) for k in ("messages", "input", "prompt", "system", "instructions", "tools")
    )
    return UsageMeter(account, sum(map(_characters, texts)) // _CHARACTERS_PER_TOKEN)


def _characters(value: object) -> int:
    """Characters of text in a part of a body, without images in base64."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(_characters(v) for k, v in value.items() if k not in ("data", "images"))
    return _CHARACTERS_PER_TOKEN if isinstance(value, int) else 0
