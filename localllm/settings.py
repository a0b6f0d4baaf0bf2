"""One table of settings: feeds flags, environment, config.toml and docs, and remembers where each value came from.

Precedence: flag, environment (LOCALLLM_…), config.toml, default. Only values nobody chose (`automatic`) may be lowered
to make something fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from localllm import paths
from localllm.errors import UsageError

Origin = Literal["flag", "environment", "config", "default"]
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `kind` parses text; `choices` limits it; the default None means "automatic"."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    default: Value
    help: str
    choices: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        """Its environment variable."""
        return "LOCALLLM_" + self.name.upper()


TABLE: tuple[Setting, ...] = (
    Setting("model", str, None, "MODEL used when none is named"),
    Setting("host", str, "127.0.0.1", "address to listen on; anything but loopback requires an API key"),
    Setting("port", int, 11535, "port to listen on"),
    Setting(
        "unix_socket", str, None, "path of a Unix socket to listen on instead of a port; only this user can open it"
    ),
    Setting("api_key", str, None, "key that clients must send (generated when the host is not loopback)"),
    Setting("context", int, None, "served context in tokens (automatic: what the plan says fits)"),
    Setting("kv_type", str, "auto", "element type of the KV cache", ("auto", "f16", "q8_0", "q4_0")),
    Setting(
        "draft", str, "auto", "speculative drafting: auto, off, ngram, mtp (the model's own heads), or a draft MODEL"
    ),
    Setting("backend", str, "auto", "engine to run with", ("auto", "llamacpp", "mlx")),
    Setting("parallel", int, 8, "requests served at the same time; more wait in the queue"),
    Setting("threads", int, None, "CPU threads (automatic: physical cores)"),
    Setting("cache_ram_gb", float, None, "memory for cached prefixes in GB (automatic: a share of what is free)"),
    Setting("cache_disk_gb", float, 8.0, "disk space for cached prefixes in GB; 0 keeps none"),
    Setting(
        "memory_headroom_gb", float, None, "memory left to other programs in GB (automatic: 5 % of it); 0 = no guard"
    ),
    Setting("idle_unload_min", float, 30.0, "minutes without a request after which a model is unloaded; 0 = never"),
    Setting(
        "compaction",
        str,
        "ask",
        "a chat that outgrows the context: ask, or auto = leave out its oldest messages",
        ("ask", "auto"),
    ),
    Setting("offline", bool, False, "never contact the hub"),
)
_BY_NAME = {s.name: s for s in TABLE}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A setting's value and where it came from."""

    value: Any
    origin: Origin

    @property
    def automatic(self) -> bool:
        """True when nobody chose it: it may be lowered to fit."""
        return self.origin == "default"


class Settings:
    """The table, resolved for one run."""

    def __init__(self, flags: dict[str, Any] | None = None) -> None:
        given = {k: v for k, v in (flags or {}).items() if v is not None}
        unknown = set(given) - set(_BY_NAME)
        if unknown:
            raise UsageError(f"unknown settings: {', '.join(sorted(unknown))}")
        config = _read_config()
        self._chosen = {s.name: _choose(s, given, config) for s in TABLE}

    def __getitem__(self, name: str) -> Chosen:
        return self._chosen[name]

    def value(self, name: str) -> Any:
        """The value of `name`."""
        return self._chosen[name].value

    def lowered(self, name: str, value: Value) -> Settings:
        """A copy in which `name`, which nobody chose, is `value`. Raises UsageError for one that somebody chose."""
        if not self._chosen[name].automatic:
            raise UsageError(f"{name} was chosen by {self._chosen[name].origin}: it is not changed to make things fit")
        copy = Settings.__new__(Settings)
        copy._chosen = {**self._chosen, name: Chosen(value, "default")}
        return copy


def _choose(setting: Setting, flags: dict[str, Any], config: dict[str, Any]) -> Chosen:
    if setting.name in flags:
        return Chosen(_parse(setting, flags[setting.name], "the command line"), "flag")
    if setting.env in os.environ and os.environ[setting.env] != "":
        return Chosen(_parse(setting, os.environ[setting.env], setting.env), "environment")
    if setting.name in config:
        return Chosen(_parse(setting, config[setting.name], "config.toml"), "config")
    return Chosen(setting.default, "default")


def _parse(setting: Setting, value: Any, where: str) -> Value:
    try:
        parsed: Value
        if setting.kind is bool and isinstance(value, str):
            parsed = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        else:
            parsed = setting.kind(value)
    except (TypeError, ValueError, KeyError):
        raise UsageError(f"{setting.name} in {where} must be {setting.kind.__name__}, not {value!r}") from None
    if setting.choices and parsed not in setting.choices:
        raise UsageError(f"{setting.name} in {where} must be one of {', '.join(setting.choices)}, not {value!r}")
    return parsed


def _read_config() -> dict[str, Any]:
    import tomllib

    path = paths.config_dir() / "config.toml"
    try:
        with path.open("rb") as f:
            data = tomllib.load(f)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
        raise UsageError(f"{path} can't be read: {e}", hint="mend the file or remove it") from e
    unknown = set(data) - set(_BY_NAME)
    if unknown:
        raise UsageError(
            f"{path} has unknown settings: {', '.join(sorted(unknown))}",
            hint=f"known: {', '.join(sorted(_BY_NAME))}",
        )
    return data
