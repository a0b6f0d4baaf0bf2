"""`localllm config`: show every setting with its value and source, and change config.toml."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm import paths
from localllm.cli.commands.shared import Json, calls_command, print_json, table
from localllm.errors import UsageError
from localllm.plain_output import print_lines
from localllm.setting_table import TABLE, Setting
from localllm.settings import Settings, checked, config_path, config_text, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from tomlkit import TOMLDocument


_SECRETS = frozenset({"api_key", "pool_key"})

app = typer.Typer(
    name="config",
    help="Show the settings and where each comes from; set, unset or edit them.",
    short_help="Show or change the settings.",
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def config(
    context: typer.Context,
    as_json: Json = False,
) -> None:
    """Show all settings: value, source, and names for changing them. Keys are never shown."""

    if calls_command(context, as_json=as_json):
        return
    settings = Settings()
    rows = [_row(setting, settings) for setting in TABLE]
    path = config_path()
    if as_json:
        print_json({"config_file": str(path), "settings": rows})
        return
    cells = [(row["name"], _value_text(row["value"]), row["origin"], row["help"]) for row in rows]
    print_lines(table(cells).splitlines())
    note = "" if path.exists() else " (does not exist yet)"
    print(f"\nset them by `localllm config set NAME VALUE` (in {path}{note}),", file=sys.stderr)
    print("by LOCALLLM_NAME in the environment, or by flags", file=sys.stderr)


def _row(setting: Setting, settings: Settings) -> dict[str, Any]:
    """Return a setting as --json prints it."""
    value = settings.value(setting.name)
    if setting.name in _SECRETS and value is not None:
        value = "(set)"
    return {
        "name": setting.name,
        "value": value,
        "origin": settings[setting.name].origin,
        "default": setting.default,
        "environment": setting.env,
        "choices": list(setting.allowed),
        "help": setting.help,
    }


@app.command("keys", short_help="The chat's keys, by their names in [chat_keys].")
def keys() -> None:
    """List the chat's keys: the names in [chat_keys] of config.toml, current keys, actions."""
    from localllm.cli.chat.config import apply_key_bindings
    from localllm_tui.control.commands import ALL_KEYS

    apply_key_bindings()
    print_lines(
        table([(key.id, key.keys_now, key.help) for key in ALL_KEYS if key.id]).splitlines()
    )


@app.command("set", short_help="Set a setting in config.toml: `config set context 16384`.")
def set_(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of a setting, as `localllm config` lists it."),
    ],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="Its value; separate several values with commas.")
    ],
) -> None:
    """Set NAME in config.toml. Other settings and comments stay unchanged."""

    setting = _setting_named(name)
    parsed = checked(setting, value, "`config set`")
    document = _document()
    document[setting.name] = list(parsed) if isinstance(parsed, tuple) else parsed
    path = _write(document)
    text = "(set)" if name in _SECRETS else _value_text(parsed)
    _print_origin(setting, f"{setting.name} = {text} in {path}")


@app.command(short_help="Remove a setting from config.toml.")
def unset(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of a setting, as `localllm config` lists it."),
    ],
) -> None:
    """Remove NAME from config.toml, so that its default applies again."""
    setting = _setting_named(name)
    document = _document()
    if setting.name not in document:
        print(f"{setting.name} is not set in config.toml")
        return
    del document[setting.name]
    path = _write(document)
    _print_origin(
        setting,
        f"{setting.name} is no longer set in {path}: {_value_text(setting.default)} by default",
    )


@app.command(short_help="Open config.toml in your editor, and check it afterwards.")
def edit() -> None:
    """Open config.toml in $VISUAL or $EDITOR, and check it afterwards."""

    editor = (
        os.environ.get("VISUAL")
        or os.environ.get("EDITOR")
        or shutil.which("nano")
        or shutil.which("vi")
    )
    if not editor:
        raise UsageError("no editor is set", hint="set EDITOR, for example EDITOR=nano")
    if not config_path().exists():
        _write(_document())
    try:
        exit_code = subprocess.run(
            [*shlex.split(editor), str(config_path())], check=False
        ).returncode
    except OSError as e:
        raise UsageError(
            f"the editor {editor!r} can't be started: {e}", hint="set EDITOR to an installed editor"
        ) from e
    if exit_code:
        raise UsageError(
            f"the editor ended with {exit_code}, and the file is as the editor left it"
        )
    Settings()  # raises an error that names the problem


def _setting_named(name: str) -> Setting:
    settings = {s.name: s for s in TABLE}
    setting_name = name.lower().replace("-", "_")
    if setting_name not in settings:
        similar = difflib.get_close_matches(setting_name, settings, n=1)
        hint = "`localllm config` lists them"
        if similar:
            hint = f"did you mean {similar[0]}?"
        raise UsageError(f"there is no setting {name!r}", hint=hint)
    return settings[setting_name]


def _document() -> TOMLDocument:
    """Return config.toml with its comments, or an empty document if it does not exist.

    Raises UsageError if it can't be read.
    """
    import tomlkit

    read_config()
    path = config_path()
    if path.exists():
        return tomlkit.parse(config_text(path))
    return tomlkit.document()


def _write(document: TOMLDocument) -> Path:
    """Write config.toml so that only its owner can read it, because it may contain a key."""
    import tomlkit

    path = config_path()
    try:
        paths.private_dir(path.parent)
        paths.write_private(path, tomlkit.dumps(document))
    except OSError as e:
        raise UsageError(
            f"{path} can't be written: {e.strerror or e}",
            hint="check the folder's rights and the disk",
        ) from e
    return path


def _print_origin(setting: Setting, result: str) -> None:
    """Print `result`, and a note if the environment overrides config.toml for that setting."""
    print(result)
    if os.environ.get(setting.env):
        print(f"{setting.env} in the environment overrides it")


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if value is None:
        return "automatic"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
