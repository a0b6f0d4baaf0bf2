"""Tables of config.toml for single models: how to load each, request defaults, further names.

[models.qwen3-8b]              # settings of the model itself
context = 32768

[models.coder]                 # a preset of it, with its own id
model = "qwen3-8b"
temperature = 0.2
aliases = ["claude-*", "gpt-*"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from localllm.cli.serve.config_tables import named_tables, read_table
from localllm.engine.messages import MAX_TOKENS, SAMPLING_RANGES
from localllm.model_names import NameTable, Rule, find
from localllm.setting_table import LOADING, Value
from localllm.settings import checked, setting

# Defaults for requests that omit these fields, with the names and ranges of the request fields.
_SAMPLING_FIELDS = tuple(name for name, allowed in SAMPLING_RANGES.items() if allowed.preset)
_OWN_FIELDS = ("model", "aliases", "system", "thinking_budget", "idle_unload_min")
KEYS = (*_OWN_FIELDS, *LOADING, *_SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One table.

    `loading`: settings that override the general ones.
    `sampling`, `system`, `thinking_tokens`: defaults for requests that omit them.
    `is_for_model`: the table configures the model of the same name and adds no new id.
    """

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    loading: Mapping[str, Value] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    thinking_tokens: int | None = None
    idle_s: float | None = None

    @property
    def is_for_model(self) -> bool:
        return self.name.lower() == self.model.lower()


def load_presets() -> tuple[Preset, ...]:
    """Return the presets of config.toml, in its order. Raises UsageError that names the invalid
    entry."""
    return tuple(_preset(name, table) for name, table in named_tables("models", "model").items())


def preset_and_model(
    presets: Iterable[Preset], typed: str | None
) -> tuple[Preset | None, str | None]:
    """Return the preset that `typed` names, and the name of the model to load.

    A preset matches by its name or by an alias without wildcards. The preset is None if `typed`
    names a model.
    """
    if typed is None:
        return None, None
    table: NameTable[Preset] = NameTable()
    for preset in presets:
        if not preset.is_for_model:
            table.add(preset.name, preset)
        for alias in preset.aliases:
            table.add_alias(alias, preset)
    named_preset = find(typed, {Rule.SERVED: table.named}).first
    if named_preset is None:
        return None, typed
    if named_preset.is_for_model:
        return None, named_preset.model
    return named_preset, named_preset.model


def _preset(name: str, table: dict[str, Any]) -> Preset:
    from pydantic import Field

    from localllm.server.dialects.fields import GenerationFields

    where = f"[models.{name}] of config.toml"
    alias = Annotated[str, Field(min_length=1)]
    tokens = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
    minutes = Annotated[float, Field(ge=0, le=10**6)]
    fields: dict[str, Any] = {
        "model": (str, ""),
        "aliases": (list[alias], []),
        "system": (str, ""),
        "thinking_budget": (tokens, -1),
        "idle_unload_min": (minutes | None, None),
    }
    for key in LOADING:
        fields[key] = (Any, None)  # checked as settings below
    for key in _SAMPLING_FIELDS:
        request_field = GenerationFields.model_fields[key]
        fields[key] = (request_field.annotation, request_field)
    values = read_table(table, where, **fields)
    loading = {}
    for key in LOADING:
        if key in table:
            loading[key] = checked(setting(key), table[key], where)
    thinking_tokens = None
    if values["thinking_budget"] >= 0:
        thinking_tokens = values["thinking_budget"]
    idle_s = None
    if values["idle_unload_min"] is not None:
        idle_s = 60.0 * values["idle_unload_min"]
    return Preset(
        name=name,
        model=values["model"] or name,
        aliases=tuple(values["aliases"]),
        loading=loading,
        sampling={key: values[key] for key in _SAMPLING_FIELDS if key in table},
        system=values["system"],
        thinking_tokens=thinking_tokens,
        idle_s=idle_s,
    )
