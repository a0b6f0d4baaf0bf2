"""Says where the floors of pyproject.toml and the lists of packaging/constraints-oldest*.txt
differ: a floor that nobody installs is a guess. Needs nothing but Python 3.11."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
CONSTRAINTS = sorted(Path(__file__).parent.glob("constraints-oldest*.txt"))
# Extras that are no part of the product, or that name one exact version.
LEFT_OUT = ("dev", "test", "docs", "starter")


def floors(pyproject: str) -> dict[str, set[str]]:
    """Of each package that the product may use, the floors of its ranges (one, if all is well),
    from `pyproject`'s text."""
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
    """Package and exact version of each line of `constraints`."""
    return dict(
        line.strip().split("==", 1)
        for line in constraints.splitlines()
        if "==" in line and line[0] != "#"
    )


def differences(pyproject: str, constraints: str) -> list[str]:
    """A sentence for each package whose floor is not what the constraints have, in the order of the
    alphabet."""
    ours, theirs = floors(pyproject), pins(constraints)
    return [
        f"{name}: pyproject.toml has {', '.join(sorted(ours.get(name, {'nothing'})))}, "
        f"constraints-oldest has {theirs.get(name, 'nothing')}"
        for name in sorted(ours.keys() | theirs.keys())
        if not ours.get(name)
        or not all(_is_floor(theirs.get(name, ""), floor) for floor in ours[name])
    ]


def _is_floor(pin: str, floor: str) -> bool:
    # `12.560` was never released as such: the first 12.560.x is its floor.
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
