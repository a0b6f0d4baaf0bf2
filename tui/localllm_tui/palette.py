"""The command palette: the chat's own commands, and of Textual's those that work here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from textual.app import App, SystemCommand

from localllm_tui.control import commands


def entries(app: App[Any], run: Callable[[str], None], spare_folder: Path) -> Iterable[SystemCommand]:
    """What the palette offers; `run` is given a command's name. A picture goes to `spare_folder` where no other takes it."""
    for command in commands.COMMANDS:
        if command.palette:
            yield SystemCommand(command.palette, command.help, _runner(run, command.name))
    yield SystemCommand("Theme", "change the colours; remembered for next time", app.action_change_theme)

    def picture() -> None:
        app.set_timer(0.1, lambda: _save_picture(app, spare_folder))  # once the palette is gone

    yield SystemCommand("Screenshot", "save this screen as an SVG picture", picture)


def _runner(run: Callable[[str], None], name: str) -> Callable[[], None]:
    return lambda: run(name)


def _save_picture(app: App[Any], spare_folder: Path) -> None:
    name = time.strftime("localllm-%Y-%m-%d-%H%M%S.svg")
    for folder in (Path.home() / "Downloads", Path.cwd(), spare_folder):
        try:
            if folder.is_dir():
                app.notify(f"saved {app.save_screenshot(name, str(folder))}", timeout=6, markup=False)
                return
        except OSError:
            continue
    app.notify("neither Downloads nor this folder takes the picture", severity="error", markup=False)
