"""Programs that use a library which may be broken: JSON objects on standard output, a line each, or
what failed and an exit status of 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from localllm_backends.contract import BackendFailure


def print_answers(ask: Callable[[], Iterable[dict[str, Any]]]) -> int:
    """The exit status. Bindings load their library, and look up every symbol of it, while they are
    imported."""
    try:
        for answer in ask():
            print(json.dumps(answer, default=str), flush=True)
    except (BackendFailure, ImportError, OSError, RuntimeError, AttributeError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0
