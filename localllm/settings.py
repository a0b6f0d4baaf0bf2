"""The settings of one run: the value of each name, and its source.

Precedence: flag, environment (LOCALLLM_…), config.toml, default. Only values that were not chosen
(`automatic`) may be lowered to make a model fit.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from localllm import paths, setting_table
from localllm.errors import UsageError
from localllm.setting_table import Setting, Value

Origin = Literal["flag", "environment", "config", "default"]
_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
# Tables of config.toml that are not settings: single models (cli/serve/presets.py), other servers
# and keys (cli/serve/upstreams.py), the chat's keys and its MCP servers (cli/chat/config.py).
_TABLES = ("models", "upstream", "keys", "chat_keys", "mcp")


class Chosen(NamedTuple):
    """A setting's value and its source."""

    value: Any
    origin: Origin

    @property
    def automatic(self) -> bool:
        """True if the value is the default: it may be lowered to make a model fit."""
        return self.origin == "default"


class Settings:
    """The values of all settings for one run."""

    def __init__(self, flags: dict[str, Any] | None = None) -> None:
        # A repeatable flag that was not given is an empty list.
        set_flags = {k: v for k, v in (flags or {}).items() if v not in (None, [])}
        unknown = set(set_flags) - _names()
        if unknown:
            raise UsageError(f"unknown settings: {', '.join(sorted(unknown))}")
        config = read_config()
        self._chosen = {s.name: _choose(s, set_flags, config) for s in setting_table.TABLE}

    def __getitem__(self, name: str) -> Chosen:
        return self._chosen[name]

    def value(self, name: str) -> Any:
        return self._chosen[name].value

    def lowered(self, name: str, value: Value) -> Settings:
        """Return a copy in which the automatic setting `name` has the value `value`.

        Raises UsageError if the setting was chosen by the user.
        """
        if not self._chosen[name].automatic:
            origin = self._chosen[name].origin
            raise UsageError(
                f"{name} was chosen by {origin}, so it is not changed to make the model fit"
            )
        return self._copy({name: Chosen(value, "default")})

    def preset(self, values: Mapping[str, Value]) -> Settings:
        """Return a copy with a model's own `values`. Flags and environment variables take
        precedence."""
        changes = {}
        for name, value in values.items():
            if self[name].origin in ("config", "default"):
                changes[name] = Chosen(value, "config")
        return self._copy(changes)

    def flags_among(self, names: Iterable[str]) -> list[Setting]:
        """Return the settings among `names` that were given as flags on this command line."""
        return [setting(name) for name in names if self[name].origin == "flag"]

    def _copy(self, changes: Mapping[str, Chosen]) -> Settings:
        copy = Settings.__new__(Settings)
        copy._chosen = {**self._chosen, **changes}
        return copy


def _choose(setting: Setting, flags: dict[str, Any], config: dict[str, Any]) -> Chosen:
    sources: tuple[tuple[Any, str, Origin], ...] = (
        (flags.get(setting.name), "the command line", "flag"),
        (os.environ.get(setting.env) or None, setting.env, "environment"),
        (config.get(setting.name), "config.toml", "config"),
    )
    for value, where, origin in sources:
        if value is not None:
            return Chosen(checked(setting, value, where), origin)
    return Chosen(setting.default, "default")


def checked(setting: Setting, value: Any, where: str) -> Value:
    """Return `value` converted to the type of `setting`.

    Raises UsageError with the setting and the source `where` if the value is invalid.
    """
    if setting.many:
        return _parse_many(setting, value, where)
    try:
        parsed: Value = _parsed(setting, value)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise UsageError(
            f"{setting.name} in {where} must be {_kind(setting)}, not {value!r}"
        ) from None
    if setting.choices and parsed not in setting.allowed:
        raise UsageError(
            f"{setting.name} in {where} must be one of {', '.join(setting.allowed)}, not {value!r}"
        )
    return parsed


def _parsed(setting: Setting, value: Any) -> Any:
    """Convert `value`. Raises what the conversion to its kind raises, or ValueError for a number
    out of range."""
    if setting.kind is bool and isinstance(value, str):
        return _SWITCH[value.lower()]
    if setting.percent and isinstance(value, str):
        value = value.removesuffix("%")
    parsed: Any = setting.kind(value)
    if setting.percent and not 1 <= parsed <= 100:
        raise ValueError
    if setting.kind in (int, float) and not (math.isfinite(parsed) and parsed >= 0):
        raise ValueError
    if not _in_range(setting, parsed):
        raise ValueError
    return parsed


def _in_range(setting: Setting, number: Any) -> bool:
    """Return False for a number outside the setting's limits. 0 means automatic."""
    if setting.least is not None and 0 < number < setting.least:
        return False
    return setting.largest is None or number <= setting.largest


def _kind(setting: Setting) -> str:
    """Describe the kind of value that the setting takes, for an error."""
    if setting.percent:
        return "a percentage of 1 to 100"
    if setting.largest is not None:
        return f"a number of 0 to {setting.largest:,}"
    if setting.least is not None:
        return f"a whole number of {setting.least:,} or more"
    if setting.kind is int:
        return "a whole number of 0 or more"
    if setting.kind is float:
        return "a number of 0 or more"
    if setting.kind is bool:
        return "true or false"
    return "a text"


def _parse_many(setting: Setting, value: Any, where: str) -> tuple[str, ...]:
    texts = value
    if isinstance(value, str):
        texts = value.split(",")
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{setting.name} in {where} must be strings, not {value!r}")
    return tuple(text.strip() for text in texts if text.strip())


def setting(name: str) -> Setting:
    """Return the row of that name. Raises KeyError."""
    for row in setting_table.TABLE:
        if row.name == name:
            return row
    raise KeyError(name)


def _names() -> set[str]:
    return {row.name for row in setting_table.TABLE}


def config_path() -> Path:
    return paths.config_dir() / "config.toml"


def config_text(path: Path) -> str:
    """Read config.toml as text, without the byte order mark (BOM) that Windows editors add."""
    return paths.file_text(path, encoding="utf-8-sig")


def read_config() -> dict[str, Any]:
    """Parse config.toml: settings, and tables of single models. Raises UsageError."""
    path = config_path()
    if not path.is_file():
        return {}
    import tomllib  # imported late: only needed if there is a config.toml

    try:
        data = tomllib.loads(config_text(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
        hint = "correct the file or remove it"
        if any(sign in str(e) for sign in ("hex value", "\\", "scaped")):
            hint = (
                'in "…" a backslash begins an escape: '
                "write a path in single quotes, 'C:\\Users\\me'"
            )
        raise UsageError(f"{path} can't be read: {e}", hint=hint) from e
    unknown = sorted(set(data) - _names() - set(_TABLES))
    if unknown:
        known = sorted(_names() | set(_TABLES))
        closest = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"known: {', '.join(known)}"
        if closest:
            hint = f"did you mean {closest[0]}?"
        raise UsageError(f"{path} has unknown settings: {', '.join(unknown)}", hint=hint)
    return data


def mistyped() -> list[str]:
    """Return a warning for each environment variable whose name is close to that of a setting."""
    prefix = "LOCALLLM_"
    names = [s.env.removeprefix(prefix) for s in setting_table.TABLE]
    others = [name.removeprefix(prefix) for name in sorted(os.environ) if name.startswith(prefix)]
    warnings_ = []
    for name in [n for n in others if n not in names and not n.endswith("_DIR")]:
        meant = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
        if meant:
            warnings_.append(
                f"{prefix}{name} is not a setting and has no effect: did you mean "
                f"{prefix}{meant[0]}?"
            )
    return warnings_
