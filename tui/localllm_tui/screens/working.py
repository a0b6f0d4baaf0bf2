"""Work beside the screen, started so that an exit in between leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

from textual.dom import DOMNode
from textual.worker import Worker


def start(
    node: DOMNode, what: Callable[[], Coroutine[Any, Any, None]], group: str, *, exclusive: bool = True
) -> Worker[None]:
    """Run `what` for as long as `node` lives; `exclusive`: in place of the rest of its group. What it raises ends it alone.

    Takes the function and not its coroutine: one that an exit keeps from being started would be warned of.
    """
    work = cast("Callable[[], Coroutine[None, None, None]]", what)
    return node.run_worker(work, group=group, exclusive=exclusive, exit_on_error=False)
