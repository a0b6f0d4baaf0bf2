"""One answer from the server's stream to the disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError, NotFoundError, UsageError
from localllm_tui.control.meter import AnswerMeter
from localllm_tui.control.physics import AnswerSpeed
from localllm_tui.control.repetition import RepetitionGuard
from localllm_tui.control.session import Session
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerTimings,
    AnswerUsage,
    IdenticalCalls,
    MessagesLeftOut,
    PromptProgress,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolResult,
    ToolStarted,
    WaitNote,
)
from localllm_tui.control.terminal import printable

# A streaming answer is written this often, so a kill -9 loses at most this much.
SAVE_EVERY_S = 0.5
# A failed write may have waited for a lock. The next write comes after this multiple of that wait.
WAIT_SHARE = 5.0

# Every question prefills up to this many tokens again: the end of the last answer, and the parts
# that the template changes.
REREAD_TOKENS = 64
STOPPED_CALL = "stopped before its result"
REREAD_SHARE = 0.25


class AnswerDisplay(Protocol):
    """Shows an answer while it streams."""

    def feed(self, text: str = "", reasoning: str = "") -> None:
        """Show a piece of the answer or of the thinking."""

    def progress(self, text: str) -> None:
        """Show the progress before the first text ("": none any more)."""

    def tool_started(self, name: str) -> None:
        """Show that a tool runs. Only the full screen can switch tools on."""
        return

    def tool(self, ran: Mapping[str, Any]) -> None:
        """Show a tool call and its result."""
        return

    def end(self, note: str) -> None:
        """The stream is over: show the rest, and `note` under the answer."""


class AnswerStream:
    """An answer while it streams, shown and counted. `reason` is its finish reason."""

    def __init__(self) -> None:
        self.meter = AnswerMeter()
        self.reason = "stopped"
        self.closed = False
        self.timings: AnswerTimings | None = None
        self._cache_miss = ""
        self._tools: list[dict[str, Any]] = []
        self._running: ToolCall | None = None

    def speed(self, used_before: int) -> AnswerSpeed:
        """Its speed: the server's timings once it is complete, until then the rate at which tokens
        arrive."""
        meter = self.meter
        if self.timings is not None and meter.usage is not None:
            speed = AnswerSpeed(meter.usage, self.timings, self._cache_miss)
            return replace(speed, ttft_s=meter.ttft_s, took_s=meter.took_s)
        usage = AnswerUsage(meter.prompt_tokens or used_before, meter.tokens)
        if meter.usage is not None:
            usage = meter.usage
        return AnswerSpeed(
            usage,
            live=meter.tok_s,
            coming=not self.closed,
            ttft_s=meter.ttft_s,
            took_s=meter.took_s,
        )

    async def run(self, stream: AsyncGenerator[StreamEvent, None], shown: AnswerDisplay) -> None:
        """Read all of `stream`. However it ends (errors and cancellations are raised again), the
        answer is closed. An answer that repeats itself is ended."""
        guard = RepetitionGuard()
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    self._take(event, shown)
                    if isinstance(event, TextDelta) and guard.loops(event.text or event.reasoning):
                        self.reason = "repetition"
                        break
        except LocalLLMError:
            self.reason = "error"
            raise
        finally:
            if self._running is not None:  # the call may have had its effects
                shown.tool(self._record(ToolResult(self._running, STOPPED_CALL, allowed=True)))
            self.close()

    def add(self, text: str = "", reasoning: str = "") -> None:
        """Take a new piece of the answer or of the thinking."""

    def close(self) -> None:
        """End it, once; for callers that do not wait for `run`."""
        self.closed = True

    def _record(self, result: ToolResult) -> Mapping[str, Any]:
        """Keep a tool call with the answer."""
        ran: dict[str, Any] = {"name": result.call.name, "arguments": result.call.arguments}
        ran["result"] = result.result
        ran["allowed"] = result.allowed
        self._tools.append(ran)
        return ran

    def _take(self, event: StreamEvent, shown: AnswerDisplay) -> None:
        first = self.meter.tokens == 0
        if isinstance(event, TextDelta):
            if first:
                shown.progress("")
            self.meter.delta()
            shown.feed(event.text, event.reasoning)
            self.add(event.text, event.reasoning)
        elif isinstance(event, PromptProgress):
            reading = self.meter.reading(event.done, event.total)
            if first:
                shown.progress(reading)
        elif isinstance(event, WaitNote):
            if first or self._tools:
                shown.progress(printable(event.note) + "…")
        elif isinstance(event, MessagesLeftOut):
            self.meter.left_out = event.messages
        elif isinstance(event, IdenticalCalls):
            self.meter.identical_calls = f"{event.name} {event.times} times"
        elif isinstance(event, ToolStarted):
            self._running = event.call
            shown.progress("")
            shown.tool_started(event.call.name)
        elif isinstance(event, ToolResult):
            self._running = None
            self.meter.continues_after_tool()
            shown.progress("")
            shown.tool(self._record(event))
        elif isinstance(event, AnswerDone):
            self.meter.usage = event.usage
            self.reason = event.reason
            self._cache_miss = event.cache_miss
            self.timings = event.timings


class PendingAnswer(AnswerStream):
    """An answer that is written to disk while it streams. The first write, and any change of
    another version, happens with its first text.

    `unsaved`: the disk does not have all of it; the answer continues anyway. `refused`: the
    error of the last write.
    """

    def __init__(
        self,
        session: Session,
        to: StoredMessage | None = None,
        *,
        continues: bool = False,
        model: str = "",
    ) -> None:
        """Start an answer to a question (None: the last one), as another version next to its
        answers.

        `to`: the question, or one of its answers.
        `model`: a model that replaces the conversation's for this answer.
        `continues`: continue an answer that was stopped, truncated or interrupted.

        Raises UsageError if there is no question, or if no answer can be continued.
        """
        super().__init__()
        begun = _continuation_of(session, to) if continues else None
        question: StoredMessage | None = begun or to or session.last_question
        if question is not None and question.role == "assistant":
            question = session.all_turns.get(question.parent_id, begun)
        if question is None:
            raise UsageError(
                "there is no question before this answer", hint="type a question and press Enter"
            )
        self.session = session
        self.question = question
        self._begun = begun
        self.model = model or session.model
        self.continues = continues
        # The continued answer replaces the old one, unless later turns follow the old one.
        self._stored: StoredMessage | None = None
        if begun is not None and not session.has_followers(begun):
            self._stored = begun
        so_far = begun or StoredMessage(0, "assistant", "")
        self.text = so_far.content
        self.reasoning = so_far.reasoning or ""
        self._grown = self.unsaved = False
        self.refused: LocalLLMError | None = None
        self._meta: dict[str, Any] | None = None  # the facts known at its end
        self._next_save_s = float("-inf")
        self._known_tokens = session.used_tokens

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.session.context(self._begun or self.question)

    @property
    def turn(self) -> StoredMessage | None:
        """The answer so far; None if it has no text. Its id is 0 until it is on disk."""
        if not self.unsaved:
            return self._stored
        return StoredMessage(0, "assistant", self.text, self.reasoning, self._meta or {})

    def add(self, text: str = "", reasoning: str = "") -> None:
        """Take a new piece, and write if the last write is SAVE_EVERY_S ago."""
        self.text += text
        self.reasoning += reasoning
        self.unsaved = self._grown = True
        self.save_if_due()

    def save_if_due(self) -> None:
        """Write the unsaved text if it is time: every SAVE_EVERY_S seconds, later after a failed
        write. Call it from a timer too: a stream may stall."""
        if self.session.now() >= self._next_save_s:
            with suppress(LocalLLMError):
                self.save()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        meta = self.meter.meta()
        if self.meter.usage is None:  # stopped, or the server counts no tokens
            prompt_tokens = self.meter.prompt_tokens or self.session.used_tokens
            if prompt_tokens:
                meta["prompt_tokens"] = prompt_tokens
            meta["completion_tokens"] = self.meter.tokens
            meta["estimated"] = True
        meta |= self._reread()
        if self._tools:
            meta["tools"] = self._tools
            self._grown = True  # the calls are kept, also without a text
        meta["finish_reason"] = self.reason
        with suppress(LocalLLMError):
            self.finish(meta)

    def finish(self, meta: dict[str, Any]) -> StoredMessage | None:
        """Write the rest of the answer with `meta`. None if it has no text."""
        self._meta = meta
        self.unsaved = self._grown
        return self.save()

    def save(self) -> StoredMessage | None:
        """Write the unsaved text now; returns the turn. After a LocalLLMError, which is raised, the
        next write is due later."""
        if not self.unsaved:
            return self._stored
        began_s = self.session.now()
        try:
            self._stored = self._write({"model": self.model, **(self._meta or {})})
        except LocalLLMError as e:
            ended_s = self.session.now()
            self._next_save_s = ended_s + max(SAVE_EVERY_S, WAIT_SHARE * (ended_s - began_s))
            self.refused = e
            raise
        self._next_save_s = self.session.now() + SAVE_EVERY_S
        self.refused = None
        self.unsaved = False
        return self._stored

    def _write(self, meta: dict[str, Any]) -> StoredMessage:
        more: dict[str, Any] = {"reasoning": self.reasoning, "meta": meta}
        more["complete"] = self._meta is not None
        if self._stored is not None:
            with suppress(NotFoundError):  # another window removed it, so it becomes a new turn
                return self.session.rewrite(replace(self._stored, content=self.text, **more))
        parent = self.question.id
        if self._begun is not None:
            parent = self._begun.parent_id
        return self.session.append("assistant", self.text, parent=parent, **more)

    def _reread(self) -> dict[str, Any]:
        """Tokens that were prefilled again although the prefix cache should have had them, and the
        reason; empty unless they are many, and if the server reports no cached tokens."""
        usage = self.meter.usage
        if usage is None or usage.cached is None:
            return {}
        again = min(self._known_tokens, usage.prompt) - usage.cached
        if again < max(REREAD_TOKENS, REREAD_SHARE * usage.prompt):
            return {}
        return {"reread_tokens": again, "reread_why": self._cache_miss}


def _continuation_of(session: Session, turn: StoredMessage | None) -> StoredMessage:
    turn = turn or next(reversed(session.turns), None)
    if turn is None:
        raise UsageError("there is no question yet", hint="type a question and press Enter")
    if turn.role != "assistant" or not turn.content.strip():
        raise UsageError(
            "there is no answer to continue", hint="/retry asks the last question again"
        )
    if not Session.unfinished(turn):
        raise UsageError("the last answer is complete", hint="/retry asks for another answer")
    return turn
