"""Check the names on the command line of `serve` before a worker starts, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.cli.serve.presets import load_presets, preset_and_model
from localllm.errors import UsageError
from localllm.library.installed_names import InstalledNames
from localllm.library.resolve import resolve
from localllm.model_names import NameTable, Rule, find


def check_names(named: Sequence[str], aliases: Sequence[str]) -> None:
    """Raise the error for a model that is not installed, or for an alias without a model.

    Raises the same errors as `resolve`, and UsageError.
    """
    presets = load_presets()
    served: NameTable[str] = NameTable((preset.name, preset.name) for preset in presets)
    for typed in named:
        preset, text = preset_and_model(presets, typed)
        local = resolve(text)
        for name in (typed, local.name, preset.name if preset else typed):
            served.add(name, local.name)
    for text in aliases:
        alias, equals, name = text.partition("=")
        is_known = not equals or _is_known(name, served)
        if not alias or not is_known:
            raise alias_error(text, [name for name, _ in served.items()])


def _is_known(name: str, served: NameTable[str]) -> bool:
    if find(name, {Rule.SERVED: served.named}).models:
        return True
    return bool(find(name, InstalledNames().rules).models)


def alias_error(text: str, served: Sequence[str]) -> UsageError:
    """Return the error for `--alias TEXT` that names no model. `served`: the names that it may use."""
    hint = "give the name of an installed model: `localllm models list`"
    if served:
        hint = f"served: {', '.join(served)}"
    return UsageError(f"--alias {text!r} must be NAME=MODEL with a served model", hint=hint)
