"""Commands of other programs that users type: each works, or names the right command."""

from __future__ import annotations

import psutil
import pytest

from localllm import __version__
from localllm.cli import main
from localllm.plain_output import wrapped


def ran(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main.run([*words])
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["list", "--json"], ["models", "list", "--json"]),
        (["show", "smollm2-135m-instruct"], ["models", "info", "smollm2-135m-instruct"]),
        (["help"], ["--help"]),
        (["help", "pull"], ["pull", "--help"]),
    ],
)
def test_a_command_of_another_program_does_the_same_as_ours(
    words: list[str], ours: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(*words) == 0
    familiar = capsys.readouterr().out
    assert ran(*ours) == 0
    assert familiar == capsys.readouterr().out != ""


def test_rm_removes_nothing_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("rm") == 2
    assert "models rm [OPTIONS] {MODEL...}" in capsys.readouterr().err


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("version") == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("ps", "localllm ls"),
        ("stop", "localllm service"),
        ("update", "catalog update"),
        ("search", "localllm recommend"),
    ],
)
def test_an_unknown_command_of_another_program_is_answered_with_our_commands(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(word) == 2
    error = capsys.readouterr().err
    assert f"no command '{word}'" in error
    assert hint in error.partition("hint")[2]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("-m", "localllm serve FILE"),
        ("--model", "localllm serve FILE"),
        ("-hf", "localllm pull ORG/NAME"),
        ("-c", "--context N"),
        ("--ctx-size=4096", "--context N"),
        ("-ngl", "--gpu-layers N"),
        ("-np", "--parallel N"),
        ("-md", "--draft MODEL"),
        ("-ctk", "--kv-type TYPE"),
    ],
)
def test_an_option_of_llama_server_is_answered_with_ours(
    option: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()
    assert ran("serve", option, "7") == 2
    error = capsys.readouterr().err
    assert f"serve has no option {option.partition('=')[0]}" in error
    assert hint in error.partition("hint")[2]
    assert psutil.Process().children() == before


def test_connect_without_an_editor_lists_the_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("connect") == 0
    out = capsys.readouterr().out.splitlines()
    assert {"opencode", "codex"} <= set(out)
    assert out[-1].startswith("for example: localllm connect")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "nosuch"], "no model is called 'nosuch'"),
        (["serve", "--alias", "coder=nosuch"], "--alias 'coder=nosuch'"),
        (["serve", "--alias", "=smollm2-135m-instruct"], "--alias '=smollm2-135m-instruct'"),
        (["serve", "--port", "99999"], "0 to 65,535"),
        (["bench", "nosuch"], "no model is called 'nosuch'"),
    ],
)
def test_a_bad_name_port_or_alias_is_refused_and_leaves_no_worker(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()
    assert ran(*words) in (2, 3)
    assert message in capsys.readouterr().err
    assert psutil.Process().children() == before


def test_a_context_below_the_smallest_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("chat", "--context", "10", "hi") == 2
    assert "256 or more" in capsys.readouterr().err


def test_config_set_names_itself_as_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("config", "set", "context", "abc") == 2
    assert "context in `config set` must be" in capsys.readouterr().err


def test_a_relative_home_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONFIG", "DATA", "CACHE", "LOG"):
        monkeypatch.delenv(f"LOCALLLM_{name}_DIR", raising=False)
    monkeypatch.setenv("HOME", "relative")
    assert ran("config") == 2
    assert "HOME is 'relative'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_long_line_is_wrapped_within_the_columns(columns: int) -> None:
    line = "  memory     112.9 GB usable of 119.0    reported: /proc/meminfo MemAvailable, as a long source"
    pieces = wrapped(line, columns)
    assert all(len(piece) <= columns for piece in pieces)
    assert " ".join(" ".join(pieces).split()) == " ".join(line.split())
    assert wrapped(line, None) == [line]
