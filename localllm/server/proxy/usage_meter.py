"""Counts the tokens of a proxied answer for the caller's key: from reported usage or by an
estimate.

OpenAI streams report usage only on request, and a client may disconnect before the end. Without an
estimate, such requests would be free.
"""

from __future__ import annotations

import re
from typing import Any

from localllm.server.http.accounts import Account, caller

# Usage is at the beginning or the end of an answer: this many bytes of each are searched.
_END_BYTES = 8192
_COUNT = re.compile(rb'"(\w+)"\s*:\s*(\d{1,12})')
# Field names of all dialects: OpenAI's, Responses' and Anthropic's, Ollama's, llama.cpp's.
_PROMPT = (b"prompt_tokens", b"input_tokens", b"prompt_eval_count", b"tokens_evaluated")
_WRITTEN = (b"completion_tokens", b"output_tokens", b"eval_count", b"tokens_predicted")
# Anthropic's input_tokens excludes cache reads and writes.
_CACHE_READ = b"cache_read_input_tokens"
_CACHE_WRITTEN = b"cache_creation_input_tokens"
# For estimating a prompt that was never counted: typical for English.
_CHARACTERS_PER_TOKEN = 4
# These paths only count tokens.
_COUNTING = ("count_tokens", "input_tokens", "tokenize", "apply-template")


class UsageMeter:
    """Counts one request for `account`, even if several nodes are tried.

    Without an account it does not count. `prompt_estimate` is the prompt's length in tokens, for
    answers that do not report it.
    """

    def __init__(self, account: Account | None = None, prompt_estimate: int = 0) -> None:
        self._account = account
        self._prompt_estimate = prompt_estimate
        self._costs: bool | None = None
        self._streams = False
        self._seen = b""
        self._frames = 0

    def begin(self, status: int, *, streams: bool) -> None:
        """Begin an answer, which replaces that of a node tried before. An error costs no tokens."""
        self._costs = status < 300
        self._streams = streams
        self._seen = b""
        self._frames = 0

    def feed(self, piece: bytes) -> None:
        if self._streams:
            self._frames += piece.count(b"data:") or piece.count(b"\n")
        self._seen += piece
        if len(self._seen) > 4 * _END_BYTES:
            self._seen = self._seen[:_END_BYTES] + b"\n" + self._seen[-_END_BYTES:]

    def close(self, *, left: bool = False) -> None:
        """End the request and charge it. `left` means that the client disconnected early.

        Unreported usage is estimated: the prompt by its length, a stream by its number of frames.
        Each frame has at least one token.
        """
        costs = left if self._costs is None else self._costs
        if self._account is None or not costs:
            return
        counts = {name: int(n) for name, n in _COUNT.findall(self._seen)}
        prompt = max(counts.get(name, 0) for name in _PROMPT)
        written = max(counts.get(name, 0) for name in _WRITTEN)
        read = counts.get(_CACHE_READ, 0)
        if prompt:
            prompt += read + counts.get(_CACHE_WRITTEN, 0)
        counted = written or self._frames
        if left:
            counted = max(written, self._frames)
        cached = counts.get(b"cached_tokens") or read
        self._account.charge(prompt or self._prompt_estimate, cached, counted)


def meter_for(path: str, body: dict[str, Any]) -> UsageMeter:
    """The meter for a request.

    It does not count for a caller without a named key, or on paths that only count tokens.
    """
    account = caller()
    if not account.name or path.rstrip("/").endswith(_COUNTING):
        return UsageMeter()
    parts = ("messages", "input", "prompt", "system", "instructions", "tools")
    n_characters = sum(_characters(body.get(part)) for part in parts)
    return UsageMeter(account, n_characters // _CHARACTERS_PER_TOKEN)


def _characters(value: object) -> int:
    """Characters of text in a part of a body, without images in base64."""
    if isinstance(value, str):
        if value.startswith("data:"):
            return 0
        return len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(_characters(v) for k, v in value.items() if k not in ("data", "images"))
    if isinstance(value, int):
        return _CHARACTERS_PER_TOKEN
    return 0
