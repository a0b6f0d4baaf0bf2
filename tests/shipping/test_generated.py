"""Man pages and completions match the command line, in the formats of their programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the output of packaging/generated.py."""
    out = tmp_path_factory.mktemp("generated")
    subprocess.run(
        [sys.executable, ROOT / "packaging" / "generated.py", out], check=True, capture_output=True
    )
    return out


def test_every_command_has_a_page_with_its_options(made: Path) -> None:
    pages = {path.stem for path in (made / "man1").iterdir()}
    assert {"localllm", "localllm-chat", "localllm-models-rm", "localllm-service-install"} <= pages
    assert "localllm-service-run" not in pages, "hidden commands have none"
    serve = (made / "man1" / "localllm-serve.1").read_text()
    assert (
        "\\fB\\-\\-port\\fR \\fIINT\\fR" in serve or ("\\fB\\-\\-port\\fR \\fIINTEGER\\fR") in serve
    )
    assert "EXIT STATUS" in (made / "man1" / "localllm.1").read_text()


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
def test_mandoc_reports_no_problem_in_the_man_pages(made: Path) -> None:
    pages = sorted((made / "man1").iterdir())
    said = subprocess.run(
        ["mandoc", "-Tlint", "-W", "warning", *pages], capture_output=True, text=True, check=False
    )
    assert said.stdout + said.stderr == ""


def completed(made: Path, *words: str) -> set[str]:
    """Return the completions that bash offers for the last of `words`."""
    script = (
        f'. "{made}/bash/localllm"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _localllm; '
        "printf "
        f'"%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words], capture_output=True, text=True, check=True, cwd=made
    )
    return set(done.stdout.split())


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_offers_commands_options_and_files(made: Path) -> None:
    assert {"chat", "serve", "service"} <= completed(made, "localllm", "")
    assert completed(made, "localllm", "service", "in") == {"install"}
    assert "--api-key" in completed(made, "localllm", "serve", "qwen3-8b", "--a")
    assert completed(made, "localllm", "chat", "man") == {"man1"}


@pytest.mark.parametrize(
    ("shell", "file"), [("zsh", "zsh/_localllm"), ("fish", "fish/localllm.fish")]
)
def test_other_shells_can_parse_their_completion_files(made: Path, shell: str, file: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", made / file], check=True)
