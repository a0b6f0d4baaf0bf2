"""Programs that use a library which may be broken: one JSON object on standard output, or what
failed and an exit status of 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def print_answer(ask: Callable[[], dict[str, Any]]) -> int:
    """The exit status. Bindings load their library, and look up every symbol of it, while they are
    imported."""
    try:
        answer = ask()
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(json.dumps(answer, default=str))
    return 0
