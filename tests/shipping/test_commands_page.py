"""docs/commands.md equals the page that is generated from the commands' help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_commands_is_current(tmp_path: Path) -> None:
    written = tmp_path / "commands.md"
    subprocess.run(
        [sys.executable, ROOT / "packaging" / "commands_page.py", written], check=True, cwd=tmp_path
    )
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert page == written.read_text("utf-8"), "write it again: make commands"
