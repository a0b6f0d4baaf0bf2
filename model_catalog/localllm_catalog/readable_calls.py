"""Whether the program can parse the tool calls of a chat template. The first import of each start
registers the function that knows this, so this module is small."""

from __future__ import annotations

from collections.abc import Callable

# The formats are in another package, so the composition root registers a function.
_readable: list[Callable[[str], bool]] = []


def read_calls_with(is_readable: Callable[[str], bool]) -> None:
    """Register `is_readable`. Templates whose tool calls it cannot parse then count as without
    tools, since the server would reject their tools."""
    _readable[:] = [is_readable]


def in_template(template: str) -> bool:
    """Return False if the program cannot parse the tool calls of this template."""
    return all(is_readable(template) for is_readable in _readable)
