"""The CI files run the commands of the Makefile and of packaging/, and mark jobs that were never
run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML comes along with huggingface-hub")
ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def jobs(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_workflow_step_names_existing_actions_and_files(file: Path) -> None:
    said = file.read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", said):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for path in re.findall(r"(?:packaging|\.ci)/[\w./-]+", said):
        assert (ROOT / path).exists(), path
    for name, job in jobs(file).items():
        assert job["timeout-minutes"] <= 90, name
        assert all("uses" in step or "run" in step for step in job["steps"]), name
        # Third-party actions have a fixed version.
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step), name


def test_jobs_on_untested_machines_may_fail_and_are_marked() -> None:
    ci = ROOT / ".github" / "workflows" / "ci.yml"
    for name in ("metal", "windows"):
        assert jobs(ci)[name]["continue-on-error"] is True
        before = ci.read_text().partition(f"\n  {name}:\n")[0].splitlines()[-1]
        assert "NOT RUN BY US" in before
