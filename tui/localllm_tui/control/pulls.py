"""Downloads while one chats: several at once, each in a thread; one that was stopped or failed goes on where it ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from localllm.errors import LocalLLMError
from localllm_tui.control.desk import Desk, PullProgress
from localllm_tui.control.wording import amount, span


class _Stopped(BaseException):
    """Ends a download from within its report: no error of it."""


@dataclass(slots=True)
class Pull:
    """One download. `name` is what it is called on this disk once it is `done`; `error` what it ended in."""

    ref: str
    now: PullProgress = field(default_factory=lambda: PullProgress("starting"))
    name: str = ""
    error: LocalLLMError | None = None
    ended: bool = False
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        """Whether the model is there."""
        return bool(self.name)

    def words(self) -> str:
        """How it is doing, in a line."""
        if self.done:
            return f"{self.ref} is here"
        if self.error is not None:
            return f"{self.ref}: {self.error.message}"
        if self.ended:
            return f"{self.ref} stopped at {amount(self.now.done_bytes)}: pulling it again goes on there"
        said = f"{self.now.doing} {self.ref}"
        if self.now.total_bytes:
            said += f" {self.now.done_bytes / self.now.total_bytes:.0%} of {amount(self.now.total_bytes)}"
        if self.now.speed_bytes_s:
            said += f", {amount(self.now.speed_bytes_s)}/s"
        if self.now.left_s is not None:
            said += f", {span(self.now.left_s)} left"
        return said


class Pulls:
    """All downloads of a chat, the newest last."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._pulls: dict[str, Pull] = {}

    def all(self) -> list[Pull]:
        """Every one, also those that ended."""
        return [*self._pulls.values()]

    def running(self) -> list[Pull]:
        """Those on their way."""
        return [p for p in self._pulls.values() if not p.ended]

    def of(self, ref: str) -> Pull | None:
        """That of a model, if there was one."""
        return self._pulls.get(ref)

    def start(self, ref: str) -> Pull:
        """Begin, or go on; one that is on its way is left alone."""
        old = self._pulls.pop(ref, None)
        if old is not None and not old.ended:
            self._pulls[ref] = old
            return old
        pull = self._pulls[ref] = Pull(ref)
        threading.Thread(target=self._run, args=(pull,), name=f"pull {ref}", daemon=True).start()
        return pull

    def stop(self, ref: str) -> None:
        """Let it end at its next report; what has arrived stays."""
        if (pull := self._pulls.get(ref)) is not None:
            pull.stopping.set()

    def stop_all(self) -> None:
        """Let all of them end."""
        for ref in self._pulls:
            self.stop(ref)

    def words(self) -> str:
        """Those on their way, in a line; "" where there are none."""
        running = self.running()
        if not running:
            return ""
        return running[0].words() + (f" (and {len(running) - 1} more)" if len(running) > 1 else "")

    def _run(self, pull: Pull) -> None:
        def told(progress: PullProgress) -> None:
            if pull.stopping.is_set():
                raise _Stopped
            pull.now = progress

        try:
            pull.name = self._desk.pull(pull.ref, told)
            pull.now = replace(pull.now, doing="done", left_s=None)
        except _Stopped:
            pass
        except LocalLLMError as e:
            pull.error = e
        except Exception as e:
            pull.error = LocalLLMError(f"the download failed: {e}")
        finally:
            pull.ended = True
