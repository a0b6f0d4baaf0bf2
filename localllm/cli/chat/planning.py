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
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, request: PlanRequest) -> Future[None]:
        """Start the child, and return at once. It prepares for `request`. The result has the errors
        of that."""
        return ThreadPoolExecutor(1, "planning").submit(self.prepare, request)

    def prepare(self, request: PlanRequest) -> None:
        self._call("prepare", request)

    def plan(
        self, request: PlanRequest, on_choice: Callable[[PlanChoice], object] = ignore_part
    ) -> PlanList:
        return self._call("plan", request, on_part=on_choice)  # type: ignore[no-any-return]

    def explain(self, request: PlanRequest, ref: str, columns: int) -> Sequence[str]:
        return self._call("explain", request, ref, columns)  # type: ignore[no-any-return]

    def fit(self, model: InstalledModel) -> str:
        return str(self._call("fit", model))

    def close(self) -> None:
        """End the child. The next call starts a new one."""
        child = self._process
        self._process = None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def _call(
        self, method: str, *arguments: object, on_part: Callable[[PlanChoice], object] = ignore_part
    ) -> Any:
        """Return the result of LocalModelService in the child. Raises LocalLLMError.

        `on_part` receives partial results.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            requests = self._process.stdin
            answers = self._process.stdout
            assert requests is not None
            assert answers is not None
            try:
                pickle.dump((method, arguments), requests)
                requests.flush()
                is_last = False
                while not is_last:
                    result, error, is_last = pickle.load(answers)
                    if not is_last:
                        on_part(result)
            except (OSError, EOFError, pickle.UnpicklingError) as e:
                raise LocalLLMError("planning failed: its process ended", hint="try again") from e
        if error is not None:
            raise error
        return result


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until the input ends, with tuples of (result, error, whether it is the
    last)."""
    service = LocalModelService()

    def send(answer: Any, error: LocalLLMError | None = None, ended: bool = True) -> None:
        pickle.dump((answer, error, ended), answers)
        answers.flush()

    while True:
        try:
            method, arguments = pickle.load(requests)
        except EOFError:
            return
        options = {}
        if method == "plan":
            options = {"on_choice": partial(send, ended=False)}
        try:
            send(getattr(service, method)(*arguments, **options))
        except LocalLLMError as e:
            send(None, e)
        except Exception as e:
            send(None, LocalLLMError(f"planning failed: {e!r}"))


if __name__ == "__main__":
    # Redirect prints to stderr, so that they don't mix with the answers.
    with os.fdopen(os.dup(1), "wb") as own:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, own)
