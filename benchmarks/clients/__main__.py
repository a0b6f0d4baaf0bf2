"""Real clients with the real server: `clients loops`, `scenes`, `table`, and `replay`.

`table` writes docs/clients.md. `replay` sends the recorded requests of a client again.

"""

from __future__ import annotations

import importlib
import sys

_PARTS = ("loops", "scenes", "table", "replay")


def main() -> None:
    """Run the named part with the remaining arguments."""
    if len(sys.argv) < 2 or sys.argv[1] not in _PARTS:
        raise SystemExit(f"which part? {', '.join(_PARTS)} (each has --help)")
    importlib.import_module(f"benchmarks.clients.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
