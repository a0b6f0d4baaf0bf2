"""`localllm config` shows the source of each value, and no key."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm import paths
from localllm.cli.all_commands import app
from localllm.errors import UsageError
from localllm.settings import Settings, mistyped


def test_config_shows_the_source_of_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    file = paths.private_dir(paths.config_dir()) / "config.toml"
    file.write_text('port = 4000\napi_key = "s3cret"\n')
    monkeypatch.setenv("LOCALLLM_PARALLEL", "3")
    run = CliRunner()
    said = json.loads(run.invoke(app, ["config", "--json"]).stdout)
    rows = {r["name"]: (r["value"], r["origin"]) for r in said["settings"]}
    assert (rows["port"], rows["parallel"], rows["host"]) == (
        (4000, "config"), (3, "environment"), ("localhost", "default"),
    )  # fmt: skip
    assert rows["api_key"] == ("(set)", "config")
    assert said["config_file"] == str(file)
    table = run.invoke(app, ["config"]).stdout
    assert "s3cret" not in table
    assert re.search(r"^context +automatic +default ", table, re.MULTILINE)


def test_config_set_writes_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.toml"
    target.write_text("# mine\ncontext = 8192\n")
    config_file().unlink(missing_ok=True)
    config_file().symlink_to(target)
    assert CliRunner().invoke(app, ["config", "set", "context", "4096"]).exit_code == 0
    assert config_file().is_symlink()
    assert target.read_text() == "# mine\ncontext = 4096\n"


def config_file() -> Path:
    return paths.private_dir(paths.config_dir()) / "config.toml"


def test_config_set_and_unset_change_one_line_and_leave_comments_alone() -> None:
    config_file().write_text(
        '# mine\ncontext = 4000  # enough\n\n[models."qwen*"]\ntemperature = 0.2\n'
    )
    run = CliRunner()
    assert run.invoke(app, ["config", "set", "kv-type", "q8_0"]).exit_code == 0
    assert run.invoke(app, ["config", "set", "context", "8192"]).exit_code == 0
    assert run.invoke(app, ["config", "set", "allow_host", "nas.lan, other"]).exit_code == 0
    text = config_file().read_text()
    assert "# mine" in text
    assert "context = 8192  # enough" in text
    assert text.index("kv_type") < text.index("[models")
    assert config_file().stat().st_mode & 0o77 == 0
    said = json.loads(run.invoke(app, ["config", "--json"]).stdout)
    values = {r["name"]: (r["value"], r["origin"]) for r in said["settings"]}
    assert values["kv_type"] == ("q8_0", "config")
    assert values["allow_host"] == (["nas.lan", "other"], "config")
    assert run.invoke(app, ["config", "unset", "context"]).exit_code == 0
    assert "context" not in config_file().read_text()
    assert "is not set" in run.invoke(app, ["config", "unset", "context"]).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "contxt", "5"], "did you mean context"),
        (
            ["set", "context", "many"],
            "context in `config set` must be a whole number of 256 or more",
        ),
        (["set", "cache_disk_gb", "inf"], "must be a number of 0 or more"),
        (["set", "kv_type", "q1"], "must be one of auto"),
        (["unset", "nothing_like_it"], "there is no setting"),
    ],
)
def test_config_set_refuses_a_value_that_could_not_be_read_back(
    words: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, ["config", *words])
    assert isinstance(result.exception, UsageError)
    assert said in f"{result.exception.message} {result.exception.hint}"
    assert not config_file().exists()


def test_config_edit_opens_the_editor_and_says_what_is_wrong_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "editor.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write('context = \"many\"\\n')")
    monkeypatch.setenv("VISUAL", f"{sys.executable} {script}")
    result = CliRunner().invoke(app, ["config", "edit"])
    assert isinstance(result.exception, UsageError)
    assert "context in config.toml" in result.exception.message


@pytest.mark.parametrize("value", ["inf", "nan", "-2", "1e999"])
def test_a_size_that_is_no_size_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE_RAM_GB", value)
    with pytest.raises(UsageError, match="LOCALLLM_CACHE_RAM_GB must be a number of 0 or more"):
        Settings()


def test_only_a_mistyped_setting_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_PARALELL", "3")
    monkeypatch.setenv("LOCALLLM_SOMETHING_OF_MINE", "3")
    assert mistyped() == [
        "LOCALLLM_PARALELL is not a setting and has no effect: did you mean LOCALLLM_PARALLEL?"
    ]


def test_an_empty_question_is_an_error_before_anything_is_loaded() -> None:
    result = CliRunner().invoke(app, ["chat", " "])
    assert isinstance(result.exception, UsageError)
    assert "empty" in result.exception.message


def test_ls_prints_the_list_of_models() -> None:
    run = CliRunner()
    assert (
        run.invoke(app, ["ls", "--json"]).stdout
        == run.invoke(app, ["models", "list", "--json"]).stdout
    )


@pytest.mark.parametrize(("group", "command"), [
    ("models", "du"), ("cache", "clear"), ("config", "edit"),
])  # fmt: skip
def test_json_before_a_command_names_its_place(group: str, command: str) -> None:
    done = CliRunner().invoke(app, [group, "--json", command])
    assert isinstance(done.exception, UsageError)
    assert done.exception.hint == f"localllm {group} {command} --json"
