"""`localllm service` writes units the service managers read back as the command meant; `localllm config` says where
each value comes from and shows no key."""

from __future__ import annotations

import json
import plistlib
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from localllm import paths
from localllm.cli.main import app
from localllm.cli.service import launchd_plist, manager_of, serve_command, systemd_unit, write_unit
from localllm.errors import UsageError


def words_of(unit: str) -> list[str]:
    """ExecStart as systemd.service(5) takes it apart."""
    line = next(x for x in unit.splitlines() if x.startswith("ExecStart=")).removeprefix("ExecStart=")
    words = []
    for quoted, bare in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line):
        word = bare or re.sub(r"\\(.)", r"\1", quoted)
        words.append(word.replace("%%", "%").replace("$$", "$"))
    return words


text = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r\0\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e"), max_size=12
)


@given(st.lists(text, min_size=1, max_size=5))
def test_a_unit_holds_the_command_whatever_the_names(words: list[str]) -> None:
    assert words_of(systemd_unit(words)) == words


# XML has no place for these.
xml_text = st.text(st.characters(min_codepoint=32, codec="utf-8", exclude_characters="\x7f\ufffe\uffff"))


@given(st.lists(xml_text, min_size=1))
def test_a_plist_holds_the_command_whatever_the_names(words: list[str]) -> None:
    agent = plistlib.loads(launchd_plist(words).encode())
    assert agent["ProgramArguments"] == words
    assert agent["KeepAlive"] == {"SuccessfulExit": False}


def test_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError):
        systemd_unit(["a\nExecStart=/bin/other"])


def test_paths_hold_wherever_it_starts_and_names_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    command = serve_command(["m.gguf", "qwen3-8b:Q4_K_M"], "s.sock")
    assert command == [
        sys.executable, "-m", "localllm", "serve", str(tmp_path.resolve() / "m.gguf"), "qwen3-8b:Q4_K_M",
        "--unix", str(tmp_path / "s.sock"),
    ]  # fmt: skip


def test_each_system_has_its_manager() -> None:
    assert (manager_of("linux"), manager_of("darwin")) == ("systemd", "launchd")
    with pytest.raises(UsageError, match="win32") as caught:
        manager_of("win32")
    assert "schtasks" in caught.value.hint


def test_another_unit_is_kept_and_the_same_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "localllm.service"
    assert write_unit(path, "one")
    assert not write_unit(path, "one")
    assert write_unit(path, "two")
    assert (path.read_text(), path.with_name("localllm.service.bak").read_text()) == ("two", "one")


def test_the_command_prints_or_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = CliRunner()
    printed = run.invoke(app, ["service", "qwen3-8b", "--manager", "systemd"])
    assert "serve qwen3-8b" in printed.stdout
    assert not (tmp_path / "systemd").exists()
    assert run.invoke(app, ["service", "qwen3-8b", "--manager", "systemd", "--write"]).exit_code == 0
    unit = tmp_path / "systemd" / "user" / "localllm.service"
    assert unit.read_text() in printed.stdout


def test_config_says_where_each_value_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    file = paths.private_dir(paths.config_dir()) / "config.toml"
    file.write_text('port = 4000\napi_key = "s3cret"\n')
    monkeypatch.setenv("LOCALLLM_PARALLEL", "3")
    run = CliRunner()
    said = json.loads(run.invoke(app, ["config", "--json"]).stdout)
    rows = {r["name"]: (r["value"], r["origin"]) for r in said["settings"]}
    assert (rows["port"], rows["parallel"], rows["host"]) == (
        (4000, "config"), (3, "environment"), ("127.0.0.1", "default"),
    )  # fmt: skip
    assert rows["api_key"] == ("(set)", "config")
    assert said["config_file"] == str(file)
    table = run.invoke(app, ["config"]).stdout
    assert "s3cret" not in table
    assert re.search(r"^context +automatic +default ", table, re.MULTILINE)
