"""Doctor says when the name localllm means another program here: a package over ours, or a command
before ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli.own_name import name_checks


def statuses(others: list[str], command: Path | None, prefix: Path) -> list[tuple[str, str]]:
    found = name_checks(lambda: others, lambda _: str(command) if command else None, prefix)
    return [(check.status, check.message) for check in found]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    return tmp_path / "env"


def script(path: Path, first_line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first_line}\nimport sys\n")
    return path


def test_this_program_alone_is_well(prefix: Path, tmp_path: Path) -> None:
    own = script(prefix / "bin" / "localllm", f"#!{prefix}/bin/python")
    launcher = script(tmp_path / "bin" / "localllm", f"#!{prefix}/bin/python3.12")
    for command in (own, launcher, None):
        assert [status for status, _ in statuses(["localllm"], command, prefix)] == ["ok"]


def test_a_package_of_another_distribution_is_an_error_with_what_to_do(prefix: Path) -> None:
    (check,) = name_checks(lambda: ["localllm", "local-llm"], lambda _: None, prefix)
    assert check.status == "error"
    assert "local-llm installed a package localllm" in check.message
    assert check.fix.startswith("pip uninstall local-llm")


@pytest.mark.parametrize("first_line", ["#!/usr/bin/python3", "\x7fELF", ""])
def test_a_command_that_starts_something_else_is_named(
    prefix: Path, tmp_path: Path, first_line: str
) -> None:
    other = script(tmp_path / "other" / "localllm", first_line)
    (_, warning) = name_checks(lambda: ["localllm"], lambda _: str(other), prefix)
    assert warning.status == "warning"
    assert str(other) in warning.message
    assert str(prefix / "bin" / "localllm") in warning.fix


def test_here_nobody_else_has_the_name() -> None:
    assert name_checks(which=lambda _: None)[0].status == "ok"
