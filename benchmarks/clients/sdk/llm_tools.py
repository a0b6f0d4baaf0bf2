"""The three tools as plain functions: `llm --functions` takes every function of a file."""

import pathlib
import subprocess


def read_file(path: str) -> str:
    """Read a file."""
    return pathlib.Path(path).read_text()


def edit_file(path: str, old_string: str, new_string: str) -> str:
    """Replace a text in a file."""
    file = pathlib.Path(path)
    file.write_text(file.read_text().replace(old_string, new_string))
    return "Edited."


def run_command(command: str, timeout_ms: int) -> str:
    """Run a command."""
    assert timeout_ms == 120_000, f"the number came as {timeout_ms!r}"
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
