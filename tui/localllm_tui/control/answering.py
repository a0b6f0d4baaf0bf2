"""One answer from the server's stream to the disk, and those that the disk refused at first."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.meter import AnswerMeter, load_of_each_core
from localllm_tui.control.physics import AnswerSpeed
from localllm_tui.control.session import PendingAnswer
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerTimings,
    AnswerUsage,
    MessagesLeftOut,
    PromptProgress,
    ReasoningDelta,
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

    def tool(self, ran: ToolResult) -> None:
        """Show a tool's call and what came of it; tools are switched on on a screen alone."""
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
        self.load = 0.0
        self._tools: list[dict[str, Any]] = []
        self._unsaved: Callable[[], object] | None = None

    def speed(self, used_before: int) -> AnswerSpeed:
        """Its speed: the server's timings once it is complete, until then the rate at which tokens
        arrive."""
        meter = self.meter
        usage = AnswerUsage(meter.prompt_tokens or used_before, meter.tokens)
        speed = AnswerSpeed(usage, live=meter.tok_s, coming=not self.closed)
        if self.timings is not None and meter.usage is not None:
            speed = AnswerSpeed(meter.usage, self.timings, self._cache_miss)
        return replace(speed, load=self.load if self.closed else load_of_each_core())

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
        if self._keep is not None and not self.closed:
            self._saving(self._keep.save_if_due)

    def close(self) -> None:
        """Write the last of the answer, once; for callers that do not wait for `run`."""
        if self.closed:
            return
        self.closed = True
        self.load = load_of_each_core()
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

        def finish() -> None:
            self.turn = keep.finish({**meta, "finish_reason": self.reason})

        if not self._saving(finish):
            self.turn = StoredMessage(
                0, "assistant", keep.text, keep.reasoning, {"finish_reason": self.reason}
            )
            self._unsaved = finish

    @property
    def unsaved(self) -> bool:
        """Whether the disk refused the last write."""
        return self._unsaved is not None

    def write_unsaved(self) -> StoredMessage | None:
        """Write what the disk refused, and return the turn. Raises LocalLLMError where it refuses
        again."""
        if self._unsaved is not None:
            self._unsaved()
            self._unsaved = None
        return self.turn

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
            case TextDelta(text):
                self._add(shown, text=text)
            case ReasoningDelta(text):
                self._add(shown, reasoning=text)
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
                shown.tool(event)
            case AnswerDone():
                self.meter.usage, self.reason = event.usage, event.reason
                self._cache_miss, self.timings = event.cache_miss, event.timings

    def _add(self, shown: AnswerDisplay, **piece: str) -> None:
        """Show, count and keep a piece of the `text` or of the `reasoning`."""
        if self.meter.tokens == 0:
            shown.progress("")
        self.meter.delta()
        shown.feed(**piece)
        keep = self._keep
        if keep is not None:
            self._saving(lambda: keep.add(**piece))

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


TRY_EVERY_S = 1.0
# A locked file makes each try wait: the UI keeps most of the time all the same.
WAIT_SHARE = 5.0


class UnsavedAnswers:
    """Answers that the disk refused; tried again by a timer, and before the next question."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._unsaved: list[tuple[AnswerStream, Callable[[StoredMessage], None]]] = []
        self._next_s = 0.0

    def add(self, answering: AnswerStream, then: Callable[[StoredMessage], None]) -> None:
        """Remember an answer that is unsaved; `then` gets its turn once it is written."""
        if answering.unsaved:
            self._unsaved.append((answering, then))
            self._next_s = self._now() + TRY_EVERY_S

    def write_all(self) -> None:
        """Write all of them. Raises LocalLLMError where the disk still refuses."""
        while self._unsaved:
            answering, then = self._unsaved[0]
            turn = answering.write_unsaved()
            del self._unsaved[0]
            if turn is not None:
                then(turn)

    def write_if_due(self) -> None:
        """`write_all` for a timer: errors are left for the next try."""
        began_s = self._now()
        if self._unsaved and began_s >= self._next_s:
            with suppress(LocalLLMError):
                self.write_all()
            ended_s = self._now()
            self._next_s = ended_s + max(TRY_EVERY_S, WAIT_SHARE * (ended_s - began_s))
