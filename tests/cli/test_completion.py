"""The shell completes commands, options and the names of installed models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.library import store

UNINSTALL = Path(__file__).parents[2] / "docs" / "guide" / "uninstall.md"
RUN = "import sys; sys.argv[0] = 'localllm'; from localllm.cli.main import run; run()"


def completed(words: str) -> list[str]:
    """Return bash's completions at the end of `words`."""
    env = {
        **os.environ,
        "_LOCALLLM_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=env, capture_output=True, text=True, timeout=60
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"), [("localllm rec", "recommend"), ("localllm chat --att", "--attach")]
)
def test_commands_and_options_are_completed(words: str, offered: str) -> None:
    assert completed(words) == [offered]


def test_names_of_installed_models_are_completed(tiny_model: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    shutil.copy(tiny_model, library / "Zebra.gguf")
    store.adopt(library)
    assert completed("localllm chat -m Zeb") == ["Zebra"]
    assert "Zebra" in completed("localllm serve Ze")


@pytest.mark.skipif(os.name == "nt", reason="the page names files of other systems' shells")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_page_on_uninstalling_names_all_that_completion_writes(
    shell: str, tmp_path: Path
) -> None:
    """The page on uninstalling lists everything that completion writes.

    Each file is in the shell's row, and so is the line in the shell's own file.
    """
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in UNINSTALL.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {shell} |")
    ]
    [(_, named, lines)] = rows
    env = {**os.environ, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}"}
    env["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--install-completion", shell],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = {p.relative_to(tmp_path): p for p in tmp_path.rglob("*") if p.is_file()}
    own = named.strip("`").removeprefix("~/")
    assert written.pop(Path(own)).read_text(), written
    for name, path in written.items():
        assert f"`~/{name}`" in lines
        for line in filter(None, path.read_text().split("\n")):
            said = line.replace(f"'{tmp_path}", "…").replace("'", "")
            assert all(part.strip() in lines.replace("'", "") for part in said.split(";")), line
