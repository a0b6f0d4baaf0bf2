"""`--help` on a terminal of 80 columns shows complete sentences."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app

CUT = ("...", "…")


@pytest.mark.parametrize("group", [[], ["models"]])
def test_no_summary_of_a_command_is_cut(group: list[str]) -> None:
    shown = (
        CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    )
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line.rstrip().endswith(CUT)] == []
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize(
    ("command", "usage"),
    [("serve", "serve [OPTIONS] [MODEL]...\n"), ("connect", "connect [OPTIONS] [EDITOR]\n")],
)
def test_usage_names_the_arguments(command: str, usage: str) -> None:
    shown = (
        CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    )
    # Newer versions of typer put required arguments into braces.
    assert usage in shown.replace("{", "").replace("}", "")
