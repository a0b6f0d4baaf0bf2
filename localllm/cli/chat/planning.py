"""Make plans for the chat's screens in a child process.

Planning occupies the interpreter for seconds. In a child process it does not delay key presses.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import IO, Any

from localllm.cli.chat.model_service import LocalModelService
from localllm.errors import LocalLLMError
from localllm_tui.control.interfaces import (
    InstalledModel,
    PlanChoice,
    PlanList,
    PlanRequest,
    ignore_part,
)


class PlanningProcess(LocalModelService):
    """Runs planning in a child process, from the first call until `close` or the end of this
    process."""

    def __init__(self, *, offline: bool = False) -> None:
        super().__init__(offline=offline)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, request: PlanRequest) -> Future[None]:
        """Start the child, and return at once. It prepares for `request`. The result has the errors
        of that."""
        return ThreadPoolExecutor(1, "planning").submit(self.prepare, request)

    def prepare(self, request: PlanRequest) -> None:
        self._call_child("prepare", request)

    def plan(
        self, request: PlanRequest, on_choice: Callable[[PlanChoice], object] = ignore_part
    ) -> PlanList:
        return self._call_child("plan", request, on_part=on_choice)  # type: ignore[no-any-return]

    def explain(self, request: PlanRequest, ref: str, columns: int) -> Sequence[str]:
        return self._call_child("explain", request, ref, columns)  # type: ignore[no-any-return]

    def fit(self, model: InstalledModel) -> str:
        return str(self._call_child("fit", model))

    def close(self) -> None:
        """End the child. The next call starts a new one."""
        child = self._child
        self._child = None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def _call_child(
        self, method: str, *given: object, on_part: Callable[[PlanChoice], object] = ignore_part
    ) -> Any:
        """Return the result of LocalModelService in the child. Raises LocalLLMError.

        `on_part` receives partial results.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self.close()
                self._child = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            to = self._child.stdin
            back = self._child.stdout
            assert to is not None
            assert back is not None
            try:
                pickle.dump((method, given), to)
                to.flush()
                ended = False
                while not ended:
                    part, error, ended = pickle.load(back)
                    if not ended:
                        on_part(part)
            except (OSError, EOFError, pickle.UnpicklingError) as e:
                raise LocalLLMError("planning failed: its process ended", hint="try again") from e
        if error is not None:
            raise error
        return part


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until the input ends, with tuples of (result, error, whether it is the
    last)."""
    service = LocalModelService()

    def send(answer: Any, error: LocalLLMError | None = None, ended: bool = True) -> None:
        pickle.dump((answer, error, ended), answers)
        answers.flush()

    while True:
        try:
            method, given = pickle.load(requests)
        except EOFError:
            return
        more = {}
        if method == "plan":
            more = {"on_choice": partial(send, ended=False)}
        try:
            send(getattr(service, method)(*given, **more))
        except LocalLLMError as e:
            send(None, e)
        except Exception as e:
            send(None, LocalLLMError(f"planning failed: {e!r}"))


if __name__ == "__main__":
    # Redirect prints to stderr, so that they don't mix with the answers.
    with os.fdopen(os.dup(1), "wb") as own:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, own)
