"""List all benchmarks (`make bench`), or run one of them (`make bench ARGS=engine_overhead`)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# Modules that other benchmarks use.
_PARTS = {
    *("__init__", "__main__", "models", "processes", "rounds"),
    *(
        "cpp_cases",
        "peers_page",
        "peers_setup",
        "real_size_long",
        "reference_cache",
        "soak_mix",
        "soak_reuse",
        "step_http",
    ),
}


def main() -> None:
    """Run the named benchmark with the remaining arguments, or list all of them with their first
    line."""
    folder = Path(__file__).parent
    files = {p.stem: p for p in folder.glob("*.py") if p.stem not in _PARTS}
    files |= {p.parent.name: p for p in folder.glob("*/__main__.py")}
    if len(sys.argv) > 1 and sys.argv[1] in files:
        name = sys.argv.pop(1)
        module = f"benchmarks.{name}" + (".__main__" if files[name].stem == "__main__" else "")
        importlib.import_module(module).main()
        return
    for name in sorted(files):
        first = files[name].read_text(encoding="utf-8").split('"""')[1].strip().splitlines()[0]
        print(f"{name:22} {first}")
    print("\nrun one: make bench ARGS=NAME (each takes minutes; --help says what it needs)")


if __name__ == "__main__":
    main()
