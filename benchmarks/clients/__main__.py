"""Real clients against the real server: `clients loops`, `clients scenes`, and `clients table`, which writes docs/clients.md."""

from __future__ import annotations

import importlib
import sys

_PARTS = ("loops", "scenes", "table")


def main() -> None:
    """Run the named part with the rest of the arguments."""
    if len(sys.argv) < 2 or sys.argv[1] not in _PARTS:
        raise SystemExit(f"which part? {', '.join(_PARTS)} (each has --help)")
    importlib.import_module(f"benchmarks.clients.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
