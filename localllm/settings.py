"""One table of settings: feeds flags, environment, config.toml and docs, and remembers where each
value came from.

Precedence: flag, environment (LOCALLLM_…), config.toml, default. Only values nobody chose
(`automatic`) may be lowered to make something fit.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localllm import paths
from localllm.errors import UsageError

Origin = Literal["flag", "environment", "config", "default"]
Value = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.
    `kind` parses text;
    `choices` limits it; the default None means "automatic".
    `many`: the value is a tuple of texts, given as a list, or as one text with commas between them.
    A number is 0 or more, and never infinite; a `percent` is 1 to 100, with or without its sign."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    default: Value
    help: str
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    many: bool = False
    percent: bool = False

    @property
    def env(self) -> str:
        return "LOCALLLM_" + self.name.upper()

    @property
    def allowed(self) -> tuple[str, ...]:
        """What its value must be one of; () = anything of its kind."""
        if callable(self.choices):
            return self.choices()
        return self.choices


def _engines() -> tuple[str, ...]:
    from localllm_backends import registry

    return ("auto", *registry.backends())


TABLE: tuple[Setting, ...] = (
    Setting("model", str, None, "MODEL used when none is named"),
    Setting(
        "host", str, "localhost", "address to listen on; anything but loopback requires an API key"
    ),
    Setting("port", int, 11535, "port to listen on"),
    Setting(
        "unix_socket",
        str,
        None,
        "path of a Unix socket to listen on instead of a port; only this user can open it",
    ),
    Setting(
        "api_key", str, None, "key that clients must send (generated when the host is not loopback)"
    ),
    Setting(
        "allow_host",
        str,
        (),
        "further names of this server that a Host may say, such as nas.lan",
        many=True,
    ),
    Setting(
        "allow_origin",
        str,
        (),
        "web pages that may use the server, such as https://chat.example; * (with a key only) = "
        "every page",
        many=True,
    ),
    Setting(
        "allow_upstream",
        str,
        (),
        "other machines that requests may be handed on to by [[upstream]]: names, addresses or "
        "networks",
        many=True,
    ),
    Setting(
        "pool",
        str,
        (),
        "servers of ours that `serve` is the front of, instead of loading a model",
        many=True,
    ),
    Setting("pool_key", str, None, "key that the servers of the pool want"),
    Setting(
        "tls_cert",
        str,
        None,
        "file with the server's certificate (PEM): it is then reached by https",
    ),
    Setting(
        "tls_key",
        str,
        None,
        "file with the certificate's private key (default: in the certificate's file)",
    ),
    Setting("context", int, None, "served context in tokens (automatic: what the plan says fits)"),
    Setting(
        "kv_type",
        str,
        "auto",
        "element type of the KV cache",
        ("auto", "f16", "q8_0", "q8_0/q4_0", "q4_0"),
    ),
    Setting(
        "draft",
        str,
        "auto",
        "drafting: auto, off, ngram, mtp (own heads), a trained drafter, or a draft MODEL",
    ),
    Setting(
        "lora",
        str,
        (),
        "LoRA adapters laid over the model: FILE, or FILE:SCALE",
        many=True,
    ),
    Setting("backend", str, "auto", "engine to run with", _engines),
    Setting(
        "build",
        str,
        None,
        "build of llama.cpp to run, of `localllm setup --list` (automatic: the one chosen there)",
    ),
    Setting(
        "gpu_layers",
        str,
        "auto",
        "layers on the GPU, the output counted as one: auto, all or a number",
    ),
    Setting(
        "cpu_moe",
        str,
        "auto",
        "layers whose experts stay in system memory, from the first: auto, all or a number",
    ),
    Setting(
        "split",
        str,
        None,
        "each GPU's share of the layers, such as 3,1 (automatic: by their memory)",
    ),
    Setting(
        "workers",
        str,
        (),
        "machines that share the model: host:port of `localllm worker`; for MLX SSH destinations, "
        "or a hostfile of MLX",
        many=True,
    ),
    Setting(
        "gap_ms",
        float,
        20.0,
        "ms that a prompt read beside may add between two tokens on a GPU, or one step if that is "
        "longer",
    ),
    Setting(
        "power",
        float,
        100.0,
        "% of the time that is computed in; below 100 it rests after each step (heat, noise, "
        "battery)",
        percent=True,
    ),
    Setting("parallel", int, 8, "requests served at the same time; more wait in the queue"),
    Setting(
        "threads",
        int,
        None,
        "CPU threads (automatic: fast physical cores, within a container's quota; fewer for "
        "decode while others want them)",
    ),
    Setting(
        "cache_ram_gb",
        float,
        None,
        "memory for cached prefixes in GB (automatic: a share of what is free)",
    ),
    Setting("cache_disk_gb", float, 8.0, "disk space for cached prefixes in GB; 0 keeps none"),
    Setting(
        "cache_disk_daily_gb",
        float,
        64.0,
        "GB of cached prefixes written to disk in a day at most; 0 = no limit",
    ),
    Setting(
        "cache_disk_free_gb", float, 2.0, "GB of the disk that cached prefixes leave to others"
    ),
    Setting(
        "memory_headroom_gb",
        float,
        None,
        "memory left to other programs in GB (automatic: 5 % of it); 0 = no guard",
    ),
    Setting(
        "wired",
        bool,
        True,
        "keep the weights of a model that fills half the memory of a Mac or more in place (MLX)",
    ),
    Setting(
        "keep_awake", bool, True, "keep a desktop from idle sleep while requests run (macOS, Linux)"
    ),
    Setting(
        "only", bool, False, "serve the models that were named, and no other that is installed"
    ),
    Setting(
        "hang_min",
        float,
        5.0,
        "minutes without any sign of life after which a model's process that is at a request is "
        "replaced; 0 = never",
    ),
    Setting(
        "idle_unload_min",
        float,
        30.0,
        "minutes without a request after which a model is unloaded; 0 = never",
    ),
    Setting(
        "compaction",
        str,
        "ask",
        "a chat that outgrows the context: ask, or auto = leave out its oldest messages",
        ("ask", "auto"),
    ),
    Setting(
        "images",
        str,
        "auto",
        "images in prompts, where a projector lies beside the model: auto = if it fits",
        ("auto", "on", "off"),
    ),
    Setting(
        "allow_image_hosts",
        str,
        (),
        "hosts (name or name:port) that images may be fetched from by https",
        many=True,
    ),
    Setting(
        "allow_pull",
        bool,
        False,
        "clients of the server may fetch and remove models (Ollama's pull and delete)",
    ),
    Setting(
        "max_connections", int, 512, "connections of requests that were let in at the same time"
    ),
    Setting(
        "max_unknown_connections",
        int,
        64,
        "connections without a key, from this machine and from outside each",
    ),
    Setting("idle_timeout_s", float, 60.0, "seconds that a connection may rest between requests"),
    Setting("idle_unknown_timeout_s", float, 5.0, "the same without a key"),
    Setting("header_timeout_s", float, 10.0, "seconds that a request's headers may take"),
    Setting(
        "body_timeout_s",
        float,
        10.0,
        "seconds that a request's body may take, besides its bytes at the least rate",
    ),
    Setting("min_body_bytes_s", int, 64_000, "least rate of a request's body, in bytes a second"),
    Setting("offline", bool, False, "never contact the hub"),
)
_BY_NAME = {s.name: s for s in TABLE}
_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
# Tables of config.toml that are not settings: what it says of single models (cli/serve/presets.py),
# of other servers and of keys (cli/serve/upstreams.py), of the chat's keys and of the programs that
# offer it tools (cli/chat/config.py).
_TABLES = ("models", "upstream", "keys", "chat_keys", "mcp")


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
        # A flag that may be repeated and was not said is an empty list.
        given = {k: v for k, v in (flags or {}).items() if v not in (None, [])}
        unknown = set(given) - set(_BY_NAME)
        if unknown:
            raise UsageError(f"unknown settings: {', '.join(sorted(unknown))}")
        config = read_config()
        self._chosen = {s.name: _choose(s, given, config) for s in TABLE}

    def __getitem__(self, name: str) -> Chosen:
        return self._chosen[name]

    def value(self, name: str) -> Any:
        return self._chosen[name].value

    def lowered(self, name: str, value: Value) -> Settings:
        """A copy in which `name`, which nobody chose, is `value`. Raises UsageError for one that
        somebody chose."""
        if not self._chosen[name].automatic:
            raise UsageError(
                f"{name} was chosen by {self._chosen[name].origin}: it is not changed "
                "to "
                "make "
                "things fit"
            )
        return self._copy({name: Chosen(value, "default")})

    def preset(self, values: Mapping[str, Value]) -> Settings:
        """A copy with a model's own values, where neither a flag nor the environment says
        otherwise."""
        return self._copy(
            {
                n: Chosen(v, "config")
                for n, v in values.items()
                if self[n].origin in ("config", "default")
            }
        )

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
    """`value` as `setting` has it. Raises UsageError naming it and `where` it stands."""
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
    """Raises what its kind raises for another, and ValueError for a number out of its bounds."""
    if setting.kind is bool and isinstance(value, str):
        return _SWITCH[value.lower()]
    if setting.percent and isinstance(value, str):
        value = value.removesuffix("%")
    parsed: Any = setting.kind(value)
    least, most = (1.0, 100.0) if setting.percent else (0.0, math.inf)
    if setting.kind in (int, float) and not (math.isfinite(parsed) and least <= parsed <= most):
        raise ValueError
    return parsed


def _kind(setting: Setting) -> str:
    if setting.percent:
        return "a percentage of 1 to 100"
    least = " of 0 or more" if setting.kind in (int, float) else ""
    return _KINDS[setting.kind] + least


def _parse_many(setting: Setting, value: Any, where: str) -> tuple[str, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{setting.name} in {where} must be texts, not {value!r}")
    return tuple(text.strip() for text in texts if text.strip())


def setting(name: str) -> Setting:
    return _BY_NAME[name]


def config_path() -> Path:
    return paths.config_dir() / "config.toml"


def config_text(path: Path) -> str:
    """What stands in config.toml; the mark that Windows' editors put before it (a BOM) is none of
    its text."""
    return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")


def read_config() -> dict[str, Any]:
    """config.toml as it stands: settings, and tables of single models. Raises UsageError."""
    path = config_path()
    if not path.is_file():
        return {}
    import tomllib  # whoever has no such file waits for no parser

    try:
        data = tomllib.loads(config_text(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
        hint = "mend the file or remove it"
        if any(sign in str(e) for sign in ("hex value", "\\", "scaped")):
            hint = (
                'in "…" a backslash begins an escape: '
                "write a path in single quotes, 'C:\\Users\\me'"
            )
        raise UsageError(f"{path} can't be read: {e}", hint=hint) from e
    unknown = set(data) - set(_BY_NAME) - set(_TABLES)
    if unknown:
        raise UsageError(
            f"{path} has unknown settings: {', '.join(sorted(unknown))}",
            hint=f"known: {', '.join(sorted(_BY_NAME))}",
        )
    return data


def mistyped() -> list[str]:
    """A sentence for each variable of the environment that is nearly, but not, the name of a
    setting."""
    prefix = "LOCALLLM_"
    names = [s.env.removeprefix(prefix) for s in TABLE]
    others = [name.removeprefix(prefix) for name in sorted(os.environ) if name.startswith(prefix)]
    said = []
    for name in [n for n in others if n not in names and not n.endswith("_DIR")]:
        meant = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
        if meant:
            said.append(
                f"{prefix}{name} is not a setting and has no effect: did you mean "
                f"{prefix}{meant[0]}?"
            )
    return said
