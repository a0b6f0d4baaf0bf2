"""Real clients against the real server: `clients loops`, `scenes`, `table` (writes
docs/clients.md), and `replay` of what one sent."""

from __future__ import annotations

import importlib
import sys

_PARTS = ("loops", "scenes", "table", "replay")


def main() -> None:
    """Run the named part with the rest of the arguments."""
    if len(sys.argv) < 2 or sys.argv[1] not in _PARTS:
        raise SystemExit(f"which part? {', '.join(_PARTS)} (each has --help)")
    importlib.import_module(f"benchmarks.clients.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
