"""A setting is declared once: its row defines the option, the variable and the config.toml key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from localllm import paths, setting_table
from localllm.cli.setting_options import with_setting_options
from localllm.errors import UsageError
from localllm.setting_table import Setting
from localllm.settings import Settings

ROWS = (
    Setting("shade", str, "plain", "colour of the answer", flag="--shade", metavar="COLOUR"),
    Setting("depth", int, None, "how deep (default: as it fits)", flag="--deep"),
    Setting("gears", str, (), "gear that is used", flag="--gear", metavar="NAME", many=True),
    Setting("effort", float, 50.0, "share of the effort", flag="--effort", percent=True),
    Setting("lamp", bool, False, "light the lamp", flag="--lamp"),
    Setting("quiet_fan", bool, True, "slow the fan down", flag="--quiet-fan"),
    Setting("mode", str, "auto", "way it runs", flag="--mode", choices=("auto", "on")),
)
NAMES = tuple(row.name for row in ROWS)

Command = Callable[..., Settings]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a command that takes all of ROWS, and returns its Settings."""
    monkeypatch.setattr(setting_table, "TABLE", (*setting_table.TABLE, *ROWS))

    @with_setting_options(*NAMES)
    def paint(
        what: Annotated[str, typer.Argument()] = "wall", *, settings: Settings, twice: bool = False
    ) -> Settings:
        return settings

    return paint


def run(command: Command, *words: str) -> Result:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, [*words], standalone_mode=False, env={"COLUMNS": "100"})


def settings_of(command: Command, *words: str) -> Settings:
    found: Any = run(command, *words).return_value
    assert isinstance(found, Settings)
    return found


def test_a_settings_row_defines_the_option_the_variable_and_the_config_key(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings_of(command)["shade"]
    assert (chosen.value, chosen.origin) == ("plain", "default")
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text('shade = "green"\n')
    chosen = settings_of(command)["shade"]
    assert (chosen.value, chosen.origin) == ("green", "config")
    monkeypatch.setenv("LOCALLLM_SHADE", "blue")
    chosen = settings_of(command)["shade"]
    assert (chosen.value, chosen.origin) == ("blue", "environment")
    chosen = settings_of(command, "door", "--shade", "red", "--twice")["shade"]
    assert (chosen.value, chosen.origin) == ("red", "flag")


def test_help_shows_each_option_with_its_placeholder_and_default(command: Command) -> None:
    shown = " ".join(run(command, "--help").output.split())
    for line in (
        "--shade COLOUR Colour of the answer (default: plain).",
        "--deep <int> How deep (default: as it fits).",
        "--gear NAME Gear that is used (repeatable).",
        "Share of the effort (default: 50).",
        "--lamp Light the lamp.",
        "--quiet-fan / --no-quiet-fan Slow the fan down.",
        "--mode [auto|on] Way it runs.",
    ):
        assert line in shown
    assert "--no-lamp" not in shown
    assert shown.index("--shade") < shown.index("--mode") < shown.index("--twice")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--deep", "3"], "depth", 3),
        (["--gear", "a", "--gear", "b"], "gears", ("a", "b")),
        (["--effort", "60%"], "effort", 60.0),
        (["--lamp"], "lamp", True),
        (["--no-quiet-fan"], "quiet_fan", False),
        (["--mode", "on"], "mode", "on"),
    ],
)
def test_an_option_has_a_value_of_its_type(
    command: Command, words: list[str], name: str, value: object
) -> None:
    settings = settings_of(command, *words)
    assert settings.value(name) == value
    assert [row.name for row in settings.flags_among(NAMES)] == [name]


def test_a_value_of_another_type_is_refused(command: Command) -> None:
    assert isinstance(run(command, "--mode", "off").exception, UsageError)
    assert "not a valid int" in str(run(command, "--deep", "many").exception)


def test_a_command_can_be_called_from_python(command: Command) -> None:
    settings = command("door", depth=2)
    assert settings.value("depth") == 2
    assert settings["shade"].automatic


def test_a_row_with_a_flag_is_an_option_of_serve() -> None:
    script = """
from localllm import setting_table
from localllm.setting_table import Setting
row = Setting("shade", str, None, "colour of the answer", flag="--shade")
setting_table.TABLE = (*setting_table.TABLE, row)
from localllm.cli.main import run
run(["serve", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "Colour of the answer." in done.stdout
