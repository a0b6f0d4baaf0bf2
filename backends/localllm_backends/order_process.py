"""Programs that work on one order for a parent process, which may end them at any time.

The order is one line of JSON on standard input. The program prints lines of JSON: its messages, and
at the end {"done": true} or {"error": "…", "hint": "…"}. If standard input ends before that, the
parent has ended or no longer wants the result: the program cleans up and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from localllm_backends import registry
from localllm_backends.backend_type import BackendType
from localllm_backends.contract import BackendFailure, LoadError

Order: TypeAlias = dict[str, Any]
Send: TypeAlias = Callable[[dict[str, Any]], None]


def _nothing(_order: Order) -> None:
    pass


def run_order(
    work: Callable[[Order, Send], None], clean_up: Callable[[Order], None] = _nothing
) -> int:
    """Read the order, run `work` on it, and return the exit status.

    `work` gets the order and a function that prints a message. `clean_up` removes what it has
    written, if standard input ends first.
    """
    # The parent decides when this process stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    is_done = threading.Event()

    def end_with_input() -> None:
        sys.stdin.read()
        if not is_done.is_set():
            clean_up(order)
            os._exit(1)

    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        work(order, _print)
    except (BackendFailure, ImportError, OSError, RuntimeError, ValueError) as e:
        _print({"error": str(e) or type(e).__name__, "hint": getattr(e, "hint", "")})
        return 1
    # From here on the result is the parent's.
    is_done.set()
    _print({"done": True})
    return 0


def backend_named(engine: str) -> BackendType:
    """Return the backend `engine`. Raises LoadError if there is no such backend."""
    found = registry.backends().get(engine)
    if found is None:
        raise LoadError(f"there is no backend {engine!r}")
    return found


def _print(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
