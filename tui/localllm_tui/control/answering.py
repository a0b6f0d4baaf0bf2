"""One answer from the server's stream to the disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.meter import AnswerMeter
from localllm_tui.control.physics import AnswerSpeed
from localllm_tui.control.session import PendingAnswer
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerTimings,
    AnswerUsage,
    MessagesLeftOut,
    PromptProgress,
    StreamEvent,
    TextDelta,
    ToolResult,
    WaitNote,
)
from localllm_tui.control.terminal import printable

# Less than this is prefilled again with every question: the end of the last answer, what the
# template changes.
REREAD_TOKENS = 64
REREAD_SHARE = 0.25


class AnswerDisplay(Protocol):
    """What shows an answer as it comes."""

    def feed(self, text: str = "", reasoning: str = "") -> None:
        """Show a piece of the answer or of the thinking."""

    def progress(self, what: str) -> None:
        """Say what happens before the first piece; "" when it is over."""

    def tool(self, ran: Mapping[str, Any]) -> None:
        """Show a tool's call and what came of it, as it is kept; tools are switched on on a screen alone."""
        return


class AnswerStream:
    """An answer while it comes, and how it ended.

    `keep` stores it (None: nothing is kept).
    `not_saved` is told of a disk that refuses, which then does not end the answer; without it, it
    does.
    `reason` is the finish reason, `turn` the stored answer once closed: None where nothing came, or
    nothing was to be kept.
    """

    def __init__(
        self, keep: PendingAnswer | None, not_saved: Callable[[LocalLLMError], None] | None = None
    ) -> None:
        self._keep = keep
        self._not_saved = not_saved
        self.meter = AnswerMeter()
        self.reason = "stopped"
        self.turn: StoredMessage | None = None
        self.closed = False
        self._known_tokens = keep.session.used_tokens if keep is not None else 0
        self._cache_miss = ""
        self.timings: AnswerTimings | None = None
        self._tools: list[dict[str, Any]] = []

    def speed(self, used_before: int) -> AnswerSpeed:
        """Its speed: the server's timings once it is complete, until then the rate at which tokens
        arrive."""
        meter = self.meter
        if self.timings is not None and meter.usage is not None:
            return AnswerSpeed(meter.usage, self.timings, self._cache_miss)
        usage = AnswerUsage(meter.prompt_tokens or used_before, meter.tokens)
        return AnswerSpeed(usage, live=meter.tok_s, coming=not self.closed)

    @property
    def text(self) -> str:
        """The answer so far, as it is kept."""
        return self._keep.text if self._keep is not None else ""

    async def run(self, stream: AsyncGenerator[StreamEvent, None], shown: AnswerDisplay) -> None:
        """Take all of `stream`. Whatever ends it (an error and a cancellation are raised on), what
        came is kept."""
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    self._take(event, shown)
        except LocalLLMError:
            self.reason = "error"
            raise
        finally:
            self.close()

    def save_if_due(self) -> None:
        """Write what is unsaved; for a timer, since a stream may stall."""
        if self._keep is not None and self._keep.due:
            self._saving(self.save)

    def save(self) -> None:
        """Write what is unsaved now. Raises LocalLLMError."""
        if self._keep is not None:
            self.turn = self._keep.save()

    def close(self) -> None:
        """Write the last of the answer, once; for callers that do not wait for `run`."""
        if self.closed:
            return
        self.closed = True
        keep, meta = self._keep, self.meter.meta()
        if keep is None:
            return
        if self.meter.usage is None:  # stopped before the server counted: what the screen showed
            used = self.meter.prompt_tokens or keep.session.used_tokens
            meta |= {
                "prompt_tokens": used,
                "completion_tokens": self.meter.tokens,
                "estimated": True,
            }

        meta |= self._reread()
        if self._tools:
            meta["tools"] = self._tools

        meta["finish_reason"] = self.reason

        def finish() -> None:
            self.turn = keep.finish(meta)

        if not self._saving(finish):
            self.turn = StoredMessage(0, "assistant", keep.text, keep.reasoning, meta)

    @property
    def unsaved(self) -> bool:
        """Whether the disk refused the last write."""
        return self._keep is not None and self._keep.unsaved

    def _reread(self) -> dict[str, Any]:
        """Tokens the prefix cache should have served but that were prefilled again, and why; only
        where they are many."""
        usage = self.meter.usage
        if usage is None:
            return {}
        again = min(self._known_tokens, usage.prompt) - usage.cached
        if again < max(REREAD_TOKENS, REREAD_SHARE * usage.prompt):
            return {}
        return {"reread_tokens": again, "reread_why": self._cache_miss}

    def _take(self, event: StreamEvent, shown: AnswerDisplay) -> None:
        first = self.meter.tokens == 0
        match event:
            case TextDelta(text, reasoning):
                self._add(shown, text, reasoning)
            case PromptProgress(done, total):
                said = self.meter.reading(done, total)
                if first:
                    shown.progress(said)
            case WaitNote(note):
                if first or self._tools:
                    shown.progress(printable(note) + "…")
            case MessagesLeftOut(messages):
                self.meter.left_out = messages
            case ToolResult(call, result, allowed):
                ran = {
                    "name": call.name,
                    "arguments": call.arguments,
                    "result": result,
                    "allowed": allowed,
                }
                self._tools.append(ran)
                shown.progress("")
                shown.tool(ran)
            case AnswerDone():
                self.meter.usage, self.reason = event.usage, event.reason
                self._cache_miss, self.timings = event.cache_miss, event.timings

    def _add(self, shown: AnswerDisplay, text: str, reasoning: str) -> None:
        """Show, count and keep a piece."""
        if self.meter.tokens == 0:
            shown.progress("")
        self.meter.delta()
        shown.feed(text, reasoning)
        keep = self._keep
        if keep is not None:
            self._saving(lambda: keep.add(text, reasoning))

    def _saving(self, write: Callable[[], object]) -> bool:
        """Call `write`; False where it failed and `not_saved` was told."""
        try:
            write()
        except LocalLLMError as e:
            if self._not_saved is None:
                raise
            self._not_saved(e)
            return False
        return True
