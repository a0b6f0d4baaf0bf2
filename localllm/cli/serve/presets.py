"""What config.toml says of single models: how each is loaded, what its requests get, by which
further names it answers.

[models.qwen3-8b]              # of the model itself
context = 32768

[models.coder]                 # a preset of it: an id of its own
model = "qwen3-8b"
temperature = 0.2
aliases = ["claude-*", "gpt-*"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from localllm.cli.serve.config_tables import check_keys, named_tables, text_of
from localllm.engine.messages import MAX_TOKENS, SAMPLING_RANGES, FieldRange, Sampling
from localllm.errors import UsageError
from localllm.settings import Setting, Value, checked, setting

# Settings that one model may have otherwise than the rest: how it is loaded.
LOADING = (
    "context", "kv_type", "draft", "lora", "backend", "gpu_layers", "cpu_moe", "split", "parallel",
    "threads", "cache_ram_gb", "power",
)  # fmt: skip
# What a request gets that does not say it, in the words and ranges of a request.
_SAMPLED = tuple(name for name, allowed in SAMPLING_RANGES.items() if allowed.preset)
_BUDGET = Setting("thinking_budget", int, None, "", signed=True)
_OWN = ("model", "aliases", "system", "thinking_budget", "idle_unload_min")
KEYS = (*_OWN, *LOADING, *_SAMPLED)


@dataclass(frozen=True, slots=True)
class Preset:
    """One table. `loading` are settings over the general ones; `sampling`, `system` and
    `thinking_tokens` are what a request gets that does not say it. `of_itself`: it speaks of the
    model of its name, and makes no new one."""

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    loading: Mapping[str, Value] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    thinking_tokens: int | None = None
    idle_s: float | None = None

    @property
    def of_itself(self) -> bool:
        return self.name.lower() == self.model.lower()


def load_presets() -> tuple[Preset, ...]:
    """The presets of config.toml, in its order. Raises UsageError that names what is wrong, and
    where."""
    return tuple(_preset(name, table) for name, table in named_tables("models", "model").items())


def _preset(name: str, table: dict[str, Any]) -> Preset:
    where = f"[models.{name}] of config.toml"
    check_keys(table, sorted(KEYS), where)
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise UsageError(f"aliases in {where} must be a list of names")
    minutes = table.get("idle_unload_min")
    budget = (
        _ranged(_BUDGET, FieldRange(-1, MAX_TOKENS), table["thinking_budget"], where)
        if "thinking_budget" in table
        else None
    )
    return Preset(
        name,
        text_of(table, "model", where, "") or name,
        tuple(aliases),
        {key: checked(setting(key), table[key], where) for key in LOADING if key in table},
        {name: _sampled(name, table[name], where) for name in _SAMPLED if name in table},
        text_of(table, "system", where, ""),
        None if budget is None or budget < 0 else int(budget),
        None
        if minutes is None
        else 60.0 * _ranged(setting("idle_unload_min"), FieldRange(0, 10**6), minutes, where),
    )


def _sampled(name: str, value: Any, where: str) -> Any:
    """A request's parameter, within the range that `engine.messages.Sampling` declares of it."""
    kind, limits = get_args(get_type_hints(Sampling, include_extras=True)[name])[:2]
    number = int if int in (kind, *get_args(kind)) else float
    return _ranged(Setting(name, number, None, "", signed=True), limits, value, where)


def _ranged(number: Setting, limits: FieldRange, value: Any, where: str) -> Any:
    found = (
        checked(number, value, where)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else None
    )
    inside = isinstance(found, int | float) and limits.least <= found <= limits.most
    if not inside or (limits.above and found == limits.least):
        least = f"above {limits.least:g} up" if limits.above else f"from {limits.least:g}"
        raise UsageError(
            f"{number.name} in {where} must be a number {least} to {limits.most:g}, not {value!r}"
        )
    return found
