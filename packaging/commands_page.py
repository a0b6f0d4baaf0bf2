"""Write docs/commands.md from the commands' own help: `python packaging/commands_page.py [FILE]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parent))
from generated import PROGRAM, Command, read

from localllm.cli.all_commands import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_HEAD = """# Commands

This page is generated from the `--help` of each command. `make commands` writes it again.
"""


def page() -> str:
    """Return the page of all commands in Markdown: a table of contents, then one section each."""
    commands = [command for command in read(get_command(app)).all() if command.words]
    lines = [_HEAD, "| command | |", "|---|---|"]
    for command in commands:
        title = _title(command)
        lines.append(f"| [`{title}`](#{title.replace(' ', '-')}) | {_cell(command.summary)} |")
    for command in commands:
        lines += ["", f"## {_title(command)}"]
        for paragraph in re.split(r"\n\s*\n", command.text):
            lines += ["", " ".join(paragraph.split())]
        rows = list(command.arguments)
        for option in command.options:
            if option.names != ("--help",):
                rows.append((f"{', '.join(option.names)} {option.metavar}".strip(), option.help))
        if rows:
            lines += ["", "| | |", "|---|---|"]
        for name, text in rows:
            lines.append(f"| `{_cell(name)}` | {_cell(text)} |")
    lines += ["", "## Exit codes", "", str(get_command(app).epilog).removeprefix("Exit codes: ")]
    return "\n".join(lines) + "\n"


def _title(command: Command) -> str:
    return f"{PROGRAM} {' '.join(command.words)}"


def _cell(text: str) -> str:
    """Return `text` for a table cell: one line, without the sign that ends a cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
