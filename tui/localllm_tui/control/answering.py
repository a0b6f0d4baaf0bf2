"""One answer on its way: from the server's stream to the disk, the numbers and whatever shows it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.client import LeftOut, PrefillDone, ReasoningDelta, StreamEvent, TextDelta, Waiting
from localllm_tui.control.meter import Meter
from localllm_tui.control.session import Answer
from localllm_tui.control.terminal import printable


class Shows(Protocol):
    """What shows an answer as it comes."""

    def feed(self, text: str = "", reasoning: str = "") -> None:
        """Show a piece of the answer or of the thinking."""
        ...

    def progress(self, what: str) -> None:
        """Say what happens before the first piece; "" when it is over."""
        ...


class Answering:
    """An answer while it comes, and how it ended.

    `keep` stores it (None: nothing is kept). `not_saved` is told of a disk that refuses, which then does not end the
    answer; without it, it does. `reason` is the finish reason, `turn` the stored answer once closed: None where nothing
    came, or nothing was to be kept.
    """

    def __init__(self, keep: Answer | None, not_saved: Callable[[LocalLLMError], None] | None = None) -> None:
        self._keep = keep
        self._not_saved = not_saved
        self.meter = Meter()
        self.reason = "stopped"
        self.turn: StoredMessage | None = None
        self.closed = False

    @property
    def text(self) -> str:
        """The answer so far, as it is kept."""
        return self._keep.text if self._keep is not None else ""

    async def run(self, stream: AsyncGenerator[StreamEvent, None], shown: Shows) -> None:
        """Take all of `stream`. Whatever ends it (an error and a cancellation are raised on), what came is kept."""
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
        """Write the last of the answer, once. For who leaves without waiting for `run`."""
        if self.closed:
            return
        self.closed = True
        keep, meta = self._keep, self.meter.meta()
        if keep is None:
            return
        if "prompt_tokens" not in meta:  # stopped before the server counted: what the screen showed
            used = keep.session.used_tokens
            meta |= {"prompt_tokens": used, "completion_tokens": self.meter.tokens, "estimated": True}

        def finish() -> None:
            self.turn = keep.finish({**meta, "finish_reason": self.reason})

        if not self._saving(finish):
            self.turn = StoredMessage(0, "assistant", keep.text, keep.reasoning, {"finish_reason": self.reason})

    def _take(self, event: StreamEvent, shown: Shows) -> None:
        first = self.meter.tokens == 0
        if isinstance(event, (TextDelta, ReasoningDelta)):
            if first:
                shown.progress("")
            self.meter.delta()
            piece = {"text" if isinstance(event, TextDelta) else "reasoning": event.text}
            shown.feed(**piece)
            keep = self._keep
            if keep is not None:
                self._saving(lambda: keep.add(**piece))
        elif isinstance(event, PrefillDone):
            self.meter.prompt_tokens = event.total
            if first:
                shown.progress(f"reading the prompt… {event.done:,} of {event.total:,} tokens")
        elif isinstance(event, Waiting):
            if first:
                shown.progress(printable(event.note) + "…")
        elif isinstance(event, LeftOut):
            self.meter.left_out = event.messages
        else:
            self.meter.usage = event.usage
            self.reason = event.reason

    def _saving(self, write: Callable[[], object]) -> bool:
        """Whether `write` wrote."""
        try:
            write()
        except LocalLLMError as e:
            if self._not_saved is None:
                raise
            self._not_saved(e)
            return False
        return True
