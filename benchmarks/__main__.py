"""`make bench`: says which measurements there are; `make bench ARGS=engine_overhead` runs one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_PLUMBING = {
    "__init__",
    "__main__",
    "ratio",
    "models",
    "reference_cache",
    "seen",
    "soak_mix",
    "soak_reuse",
    "sse",
    "timing",
}


def main() -> None:
    """Run the named benchmark with the rest of the arguments, or list them all with their first line."""
    folder = Path(__file__).parent
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem not in _PLUMBING)
    if len(sys.argv) > 1 and sys.argv[1] in names:
        name = sys.argv.pop(1)
        importlib.import_module(f"benchmarks.{name}").main()
        return
    for name in names:
        first = (folder / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].strip().splitlines()[0]
        print(f"{name:22} {first}")
    print("\nrun one: make bench ARGS=NAME (each takes minutes; --help says what it needs)")


if __name__ == "__main__":
    main()
