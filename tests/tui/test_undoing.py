"""Pasted or typed text can be undone and redone, with any number of rows."""

from __future__ import annotations

from typing import Any

import pytest
from textual import events

from tui.conftest import Driver

ROWS = "\n".join(f"row {n} of what was pasted" for n in range(40))


@pytest.mark.parametrize("before", ["", "lookatthis"])
def test_a_paste_of_many_rows_is_undone_and_redone(drive: Any, before: str) -> None:
    async def play(d: Driver) -> None:
        await d.press(*before)
        d.app.post_message(events.Paste(ROWS))
        await d.until(lambda: d.app.page.composer.text == before + ROWS)
        await d.press("ctrl+z")
        assert d.app.page.composer.text == before
        await d.press("ctrl+y")
        assert d.app.page.composer.text == before + ROWS
        await d.press("ctrl+z", "x")
        assert d.app.page.composer.text == before + "x"

    drive(play)
