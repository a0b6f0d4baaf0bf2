"""What config.toml says of single models: how each is loaded, what its requests get, by which further names it answers.

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
from typing import Any

from localllm.cli.compose.config_tables import check_keys, named_tables, text_of
from localllm.errors import UsageError
from localllm.settings import Setting, Value, checked, setting

# Settings that one model may have otherwise than the rest: how it is loaded.
LOADING = (
    "context", "kv_type", "draft", "backend", "gpu_layers", "cpu_moe", "split", "parallel", "threads", "cache_ram_gb",
)  # fmt: skip
# (name, least, most): what a request gets that does not say it, in the words and ranges of a request.
_SAMPLING: tuple[tuple[Setting, float, float], ...] = (
    (Setting("temperature", float, None, ""), 0, 100),
    (Setting("top_k", int, None, ""), 0, 2**31 - 1),
    (Setting("top_p", float, None, ""), 0, 1),
    (Setting("min_p", float, None, ""), 0, 1),
    (Setting("typical_p", float, None, ""), 0, 1),
    (Setting("repeat_penalty", float, None, ""), 0.01, 10),
    (Setting("repeat_last_n", int, None, ""), 0, 2**31 - 1),
    (Setting("presence_penalty", float, None, "", signed=True), -2, 2),
    (Setting("frequency_penalty", float, None, "", signed=True), -2, 2),
    (Setting("seed", int, None, ""), 0, 2**63 - 1),
)
_BUDGET = (Setting("thinking_budget", int, None, "", signed=True), -1, 2**31 - 1)
_OWN = ("model", "aliases", "system", "thinking_budget", "idle_unload_min")
KEYS = (*_OWN, *LOADING, *(s.name for s, _, _ in _SAMPLING))


@dataclass(frozen=True, slots=True)
class Preset:
    """One table. `loading` are settings over the general ones; `sampling`, `system` and `thinking_tokens` are what a
    request gets that does not say it. `of_itself`: it speaks of the model of its name, and makes no new one."""

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
    """The presets of config.toml, in its order. Raises UsageError that names what is wrong, and where."""
    return tuple(_preset(name, table) for name, table in named_tables("models", "model").items())


def _preset(name: str, table: dict[str, Any]) -> Preset:
    where = f"[models.{name}] of config.toml"
    check_keys(table, sorted(KEYS), where)
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise UsageError(f"aliases in {where} must be a list of names")
    minutes = table.get("idle_unload_min")
    budget = _ranged(*_BUDGET, table["thinking_budget"], where) if "thinking_budget" in table else None
    return Preset(
        name,
        text_of(table, "model", where, "") or name,
        tuple(aliases),
        {key: checked(setting(key), table[key], where) for key in LOADING if key in table},
        {s.name: _ranged(s, least, most, table[s.name], where) for s, least, most in _SAMPLING if s.name in table},
        text_of(table, "system", where, ""),
        None if budget is None or budget < 0 else int(budget),
        None if minutes is None else 60.0 * _ranged(setting("idle_unload_min"), 0, 10**6, minutes, where),
    )


def _ranged(number: Setting, least: float, most: float, value: Any, where: str) -> Any:
    found = checked(number, value, where) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if not isinstance(found, int | float) or not least <= found <= most:
        raise UsageError(f"{number.name} in {where} must be a number from {least:g} to {most:g}, not {value!r}")
    return found
