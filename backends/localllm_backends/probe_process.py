"""Helper programs that use a library which may be broken.

They print JSON objects to standard output, one per line. On a failure they print the error and exit
with status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from localllm_backends.contract import BackendFailure


def print_answers(ask: Callable[[], Iterable[dict[str, Any]]]) -> int:
    """Print the answers of `ask` and return the exit status.

    `ask` also imports the bindings, because they load their library and look up its symbols at
    import.
    """
    try:
        for answer in ask():
            print(json.dumps(answer, default=str), flush=True)
    except (BackendFailure, ImportError, OSError, RuntimeError, AttributeError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0
