"""For the site: a page of every command, made from the program; and links to files that are not
pages become their names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parent))
from generated import PROGRAM, read

from localllm.cli.all_commands import app

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?!guide/)(?![\w-]+\.md)[^)]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """With `commands.md`: each command, its arguments and options, in the words of its `--help`."""
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """`[text](../tests/x.py)` without its link, on pages at the top; pages below docs/guide link to
    pages alone."""
    return markdown if page.file.src_uri.startswith("guide/") else _OUTSIDE.sub(r"\1", markdown)


def commands() -> str:
    """The page of all commands, in Markdown."""
    lines = [
        "# Commands",
        "",
        "What `--help` says of each; man pages are made from the same (`packaging/generated.py`).",
    ]
    for command in read(get_command(app)).all():
        if not command.words:
            continue
        lines += [
            "",
            f"## {PROGRAM} {' '.join(command.words)}",
            "",
            re.sub(r"\n(?=\S)", " ", command.text),
        ]
        rows = [*command.arguments]
        rows += [(f"{', '.join(o.names)} {o.metavar}".strip(), o.help) for o in command.options]
        lines += ["", "| | |", "|---|---|"] if rows else []
        lines += [
            f"| `{name.replace('|', '¦')}` | {said.replace('|', '¦')} |" for name, said in rows
        ]
    return "\n".join(lines) + "\n"
