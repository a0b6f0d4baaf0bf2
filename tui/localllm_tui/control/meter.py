"""The figures of an answer as it streams, their status line, and what the input and files cost in
tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from localllm.errors import ContextLengthError, UsageError
from localllm.formatting import byte_size, span
from localllm_tui.control.attachments import (
    check_fits_context,
    is_media,
    is_sound,
    read_files,
    sound_length,
    with_files,
)
from localllm_tui.control.client import ChatClient
from localllm_tui.control.formatting import BAR_CELLS, bar, elide
from localllm_tui.control.stream_events import AnswerUsage
from localllm_tui.control.terminal import one_line

_GAP = "  "
# Tokens that arrive within less time came in one piece, and their speed is unknown.
_MIN_SPEED_S = 0.1


class AnswerMeter:
    """Counts one answer. While it streams a delta counts as a token; the server's usage replaces
    the count."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._started_s = now()
        self._first_s: float | None = None
        # the first token of the part whose speed is measured
        self._part_s: float | None = None
        self._last_s: float | None = None
        self._deltas = self._part_deltas = 0
        # the time and the tokens of the first progress report
        self._reading: tuple[float, int] | None = None
        self.prompt_tokens = 0
        self.left_out = 0  # messages that the server left out to make the conversation fit
        # The tool that was called repeatedly with the same result, and how often.
        self.identical_calls = ""
        self.usage: AnswerUsage | None = None

    def delta(self) -> None:
        self._last_s = self._now()
        if self._first_s is None:
            self._first_s = self._last_s
        if self._part_s is None:
            self._part_s = self._last_s
        self._deltas += 1
        self._part_deltas += 1

    def continues_after_tool(self) -> None:
        """Measure the speed from the next token on: the server's usage counts only the part after
        the last tool."""
        self._part_s = None
        self._part_deltas = 0

    def reading(self, done: int, total: int) -> str:
        """The progress of the prefill in words: tokens, and after a moment the rate, the time so
        far and the time left."""
        self.prompt_tokens = total
        now = self._now()
        if self._reading is None:
            self._reading = (
                now,
                done,
            )  # these tokens came from the cache, so they were not prefilled
        begun_s, begun = self._reading
        words = f"reading the prompt… {done:,} of {total:,} tokens"
        took_s = now - begun_s
        if done <= begun or took_s <= 0:
            return words
        rate = (done - begun) / took_s
        left_s = (total - done) / rate
        return f"{words} · {rate:,.0f} tok/s · {span(took_s)}, {span(left_s)} left"

    @property
    def took_s(self) -> float:
        """Seconds since the question was sent, until the last token."""
        return (self._last_s or self._now()) - self._started_s

    @property
    def tokens(self) -> int:
        if self.usage and self.usage.completion:
            return self.usage.completion
        return self._deltas

    @property
    def ttft_s(self) -> float | None:
        """TTFT in seconds, as seen by this client."""
        if self._first_s is None:
            return None
        return self._first_s - self._started_s

    @property
    def tok_s(self) -> float | None:
        """Tokens per second from the first token to the last, after the last tool; None before the
        second token, or if the tokens came in one piece."""
        tokens = self._part_deltas
        if self.usage and self.usage.completion:
            tokens = self.usage.completion
        if self._part_s is None or self._last_s is None or tokens < 2:
            return None
        seconds = self._last_s - self._part_s
        if seconds >= _MIN_SPEED_S:
            return (tokens - 1) / seconds
        return None

    @property
    def used(self) -> int:
        """Context in use: the prompt (once its length is known) and the generated tokens."""
        prompt = self.prompt_tokens
        if self.usage and self.usage.prompt:
            prompt = self.usage.prompt
        if prompt:
            return prompt + self.tokens
        return 0

    def meta(self) -> dict[str, Any]:
        """The metadata that the history keeps with the answer."""
        meta: dict[str, Any] = {}
        if self.left_out:
            meta["left_out"] = self.left_out
        if self.identical_calls:
            meta["identical_calls"] = self.identical_calls
        if self.ttft_s is not None:
            meta["ttft_s"] = round(self.ttft_s, 4)
        if self.tok_s is not None:
            meta["tok_s"] = round(self.tok_s, 2)
        if self.used:
            usage = self.usage or AnswerUsage(self.prompt_tokens)
            prompt = usage.prompt or self.prompt_tokens
            meta |= {"prompt_tokens": prompt, "completion_tokens": self.tokens}
            if usage.cached is not None:
                meta["cached_tokens"] = usage.cached
        return meta


def status_text(
    width: int, model: str, used: int | None, n_ctx: int | None, meta: Mapping[str, Any]
) -> str:
    """The status line in at most `width` cells, with short names in a narrow one. `used` tokens of
    a context of `n_ctx` (each None: unknown); `meta` as the history keeps it with an answer
    (AnswerMeter.meta)."""
    model = one_line(model)
    for words, cells, min_width in ((True, BAR_CELLS, 40), (False, 8, 40), (False, 0, 12)):
        parts = [*_figures(used, n_ctx, meta, words, cells)]
        model_width = width - sum(cell_len(part) + len(_GAP) for part in parts)
        if model_width >= min(cell_len(model), min_width):
            return _GAP.join([elide(model, model_width), *parts])
    while parts and model_width < 8:
        model_width += cell_len(parts.pop()) + len(_GAP)
    return elide(_GAP.join([elide(model, max(model_width, 1)), *parts]), width)


# The names of the figures: in words, and short ones for a narrow line.
_WORDS = ("context", "first token", "cached tokens")
_SHORT = ("ctx", "TTFT", "cached")


def _figures(
    used: int | None, n_ctx: int | None, meta: Mapping[str, Any], words: bool, bar_cells: int
) -> Iterator[str]:
    context, first_token, cached = _WORDS if words else _SHORT
    if "tok_s" in meta:
        yield f"{meta['tok_s']:.1f} tok/s"
    if n_ctx and used is not None:
        figure = f"{context} {used:,}/{n_ctx:,}"
        if bar_cells:
            figure += f" {bar(used, n_ctx, bar_cells)}"
        if words:
            figure += f" {min(999, round(100 * used / n_ctx))}%"
        yield figure
    elif used:
        yield f"{context} {used:,}"
    if "ttft_s" in meta:
        digits = 2 if meta["ttft_s"] < 9.995 else 0
        yield f"{first_token} {meta['ttft_s']:.{digits}f} s"
    if "cached_tokens" in meta:
        yield f"{cached} {meta['cached_tokens']:,}"


def cost_words(tokens: int | None, n_ctx: int | None) -> str:
    """The tokens that a request would have, for the input's frame; "" if they are unknown
    (None)."""
    if tokens is None:
        return ""
    if n_ctx is None:
        return f"{tokens:,} tokens in total"
    if tokens >= n_ctx:
        return f"{tokens:,} of {n_ctx:,} tokens: too long"
    return f"{tokens:,} of {n_ctx:,} tokens in total"


async def check_fits(
    client: ChatClient,
    model: str,
    n_ctx: int | None,
    messages_for: Callable[[bool], Sequence[Mapping[str, str]]],
    *,
    compacts: bool,
) -> None:
    """Raise ContextLengthError before a question is sent that the server would reject for its
    length.

    The user can then change it. `messages_for` returns the messages to send. With True it omits
    earlier turns, which the server may do with `compacts`. If the server can't count tokens, the
    check is skipped.
    """
    if n_ctx is None:
        return
    messages = messages_for(compacts)
    if sum(len(m["content"].encode("utf-8", "replace")) for m in messages) < n_ctx // 2:
        return  # a token has at least one byte, and no template doubles a conversation
    tokens = await client.count(model, messages)
    if tokens is None or tokens < n_ctx:
        return
    question_tokens: int | None = tokens
    if not compacts:
        question_tokens = await client.count(model, messages_for(True))
    if question_tokens is not None and question_tokens >= n_ctx:
        raise ContextLengthError(
            f"it was not sent: the question alone has {question_tokens:,} tokens, but the "
            f"context has {n_ctx:,}",
            hint="shorten it, or start the chat with a larger --context",
        )
    raise ContextLengthError(
        f"it was not sent: with the earlier messages it has {tokens:,} tokens, but the context "
        f"has {n_ctx:,}",
        hint="shorten it, or replace the earlier messages by a summary: Ctrl+P, Compact the conversation",
    )


async def file_cost(
    client: ChatClient, model: str, path: Path, n_ctx: int | None
) -> tuple[str, bool]:
    """The tokens of a file, or the reason why it can't be attached, in a few words ("" if the
    server can't count); and whether it can be attached. The server counts, except if the file can't
    fit with any tokenizer."""
    try:
        files, _ = await asyncio.to_thread(read_files, path)
        check_fits_context(files, n_ctx)
    except ContextLengthError:
        return f"too long: {byte_size(sum(len(text.encode()) for _, text in files))}", False
    except UsageError as e:
        words = e.message
        for begun in (f"{path.name} is ", f"{path} has ", f"{path} ", "a "):
            words = words.removeprefix(begun)
        return words.split(",")[0].split(" (")[0], False
    question = [{"role": "user", "content": with_files("", files)}]
    tokens, why_not = await client.counted(model, question)
    attachment = files[0][1]
    if why_not and is_media(attachment):
        return why_not.rpartition(": ")[2], False
    length = ""
    if is_sound(attachment):
        length = await asyncio.to_thread(sound_length, attachment)
    if tokens is None:
        return length, True
    if n_ctx is None or tokens < n_ctx:
        cost = f"{tokens:,} tokens"
        return f"{length}, {cost}" if length else cost, True
    return f"too long: {tokens:,} tokens", False
