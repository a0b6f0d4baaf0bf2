"""The shell completes commands, options and the names of installed models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.library import store

RUN = "import sys; sys.argv[0] = 'localllm'; from localllm.cli.main import run; run()"


def completed(words: str) -> list[str]:
    """What bash is offered at the end of `words`."""
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
def test_commands_and_options(words: str, offered: str) -> None:
    assert completed(words) == [offered]


def test_names_of_models_on_this_disk(tiny_model: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    shutil.copy(tiny_model, library / "Zebra.gguf")
    store.adopt(library)
    assert completed("localllm chat -m Zeb") == ["Zebra"]
    assert "Zebra" in completed("localllm serve Ze")
