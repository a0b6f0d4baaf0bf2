"""Report differences between the minimum versions in pyproject.toml and in
packaging/constraints-oldest*.txt. A minimum that is never installed is a guess. This needs only
Python 3.11."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
CONSTRAINTS = sorted(Path(__file__).parent.glob("constraints-oldest*.txt"))
# Extras that are not part of the product, or that name one exact version.
LEFT_OUT = ("dev", "test", "docs", "starter")


def floors(pyproject: str) -> dict[str, set[str]]:
    """Return the minimum versions of each package that the product may use, from `pyproject`'s
    text. Each set has one element if the ranges agree."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {})
    ranges = [
        *project["dependencies"],
        *(line for name in extras if name not in LEFT_OUT for line in extras[name]),
    ]
    found: dict[str, set[str]] = {}
    for line in ranges:
        told = re.match(r"([\w-]+)(?:\[[^]]*\])?>=([\d.]+)", line)
        if told is None:
            raise ValueError(f"{line!r} has no floor")
        found.setdefault(told[1], set()).add(told[2])
    return found


def pins(constraints: str) -> dict[str, str]:
    """Return the package and exact version of each line of `constraints`."""
    return dict(
        line.strip().split("==", 1)
        for line in constraints.splitlines()
        if "==" in line and line[0] != "#"
    )


def differences(pyproject: str, constraints: str) -> list[str]:
    """Return one sentence for each package whose minimum differs from the constraints, sorted by
    name."""
    ours, theirs = floors(pyproject), pins(constraints)
    return [
        f"{name}: pyproject.toml has {', '.join(sorted(ours.get(name, {'nothing'})))}, "
        f"constraints-oldest has {theirs.get(name, 'nothing')}"
        for name in sorted(ours.keys() | theirs.keys())
        if not ours.get(name)
        or not all(_is_floor(theirs.get(name, ""), floor) for floor in ours[name])
    ]


def _is_floor(pin: str, floor: str) -> bool:
    # There was no release `12.560`, so the first 12.560.x is its minimum.
    return bool(pin) and (_release(pin) == _release(floor) or pin.startswith(floor + "."))


def _release(version: str) -> list[int]:
    numbers = [int(n) for n in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


if __name__ == "__main__":
    constraints = "\n".join(file.read_text(encoding="utf-8") for file in CONSTRAINTS)
    wrong = differences(PYPROJECT.read_text(encoding="utf-8"), constraints)
    for sentence in wrong:
        print(f"error: {sentence}", file=sys.stderr)
    sys.exit(bool(wrong))
