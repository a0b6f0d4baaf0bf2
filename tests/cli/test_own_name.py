"""`doctor` reports another program named localllm: a package over ours, or a command before
ours."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from localllm.cli.own_name import NAME, name_checks


def statuses(others: list[str], command: Path | None, prefix: Path) -> list[tuple[str, str]]:
    found = name_checks(others, str(command) if command else None, prefix)
    return [(check.status, check.message) for check in found]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    return tmp_path / "env"


def script(path: Path, first_line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first_line}\nimport sys\n")
    return path


def test_no_fault_is_reported_if_only_this_program_has_the_name(
    prefix: Path, tmp_path: Path
) -> None:
    own = script(prefix / "bin" / "localllm", f"#!{prefix}/bin/python")
    launcher = script(tmp_path / "bin" / "localllm", f"#!{prefix}/bin/python3.12")
    for command in (own, launcher, None):
        assert [status for status, _ in statuses(["localllm"], command, prefix)] == ["ok"]


def test_a_package_of_another_distribution_is_an_error_with_its_fix(prefix: Path) -> None:
    (check,) = name_checks(["localllm", "local-llm"], None, prefix)
    assert check.status == "error"
    assert "local-llm installed a package localllm" in check.message
    assert check.fix.startswith("pip uninstall local-llm")


@pytest.mark.parametrize("first_line", ["#!/usr/bin/python3", "\x7fELF", ""])
def test_a_command_that_starts_another_program_is_a_warning(
    prefix: Path, tmp_path: Path, first_line: str
) -> None:
    other = script(tmp_path / "other" / "localllm", first_line)
    (_, warning) = name_checks(["localllm"], str(other), prefix)
    assert warning.status == "warning"
    assert str(other) in warning.message
    assert str(prefix / "bin" / "localllm") in warning.fix


def test_no_other_distribution_here_has_the_name() -> None:
    installing = metadata.packages_distributions().get(NAME, ())
    assert [check.status for check in name_checks(installing, None, Path(sys.prefix))] == ["ok"]
