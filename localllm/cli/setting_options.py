"""Command-line options made from the rows of the settings table (localllm/setting_table.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

import typer

from localllm import setting_table
from localllm.setting_table import Setting
from localllm.settings import Settings, setting

T = TypeVar("T")


def with_flags(names: Collection[str] | None = None) -> tuple[str, ...]:
    """Of these settings (None: of all), the names of those that have a flag."""
    rows = (row for row in setting_table.TABLE if names is None or row.name in names)
    return tuple(row.name for row in rows if row.flag)


def with_setting_options(*names: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator that gives a command the options of these settings.

    The command has a keyword-only parameter `settings: Settings`. typer sees the options instead. A
    Python caller may pass values by the names of the settings.
    """
    rows = [setting(name) for name in names]

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @wraps(command)
        def with_settings(*arguments: Any, **given: Any) -> T:
            flags = {row.name: given.pop(row.name, None) for row in rows}
            return command(*arguments, settings=Settings(flags), **given)

        with_settings.__signature__ = _signature(command, rows)  # type: ignore[attr-defined]
        return with_settings

    return decorate


def _signature(command: Callable[..., Any], rows: list[Setting]) -> inspect.Signature:
    """Return the signature of `command`, with `settings` replaced by a parameter for each row."""
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for name, parameter in signature.parameters.items():
        if name == "settings":
            parameters += [_parameter(row) for row in rows]
        else:
            parameters.append(parameter)
    return signature.replace(parameters=parameters)


def _parameter(row: Setting) -> inspect.Parameter:
    """Return the parameter from which typer makes the row's option. Its default is None."""
    flag = row.flag
    if row.default is True:
        flag += f"/--no-{flag.removeprefix('--')}"
    option = typer.Option(None, flag, metavar=_metavar(row), help=_help(row))
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_kind(row)
    )


def _kind(row: Setting) -> Any:
    if row.many:
        return list[str] | None
    if row.percent:
        return str | None  # "60%"
    return row.kind | None


def _metavar(row: Setting) -> str | None:
    if isinstance(row.choices, tuple) and row.choices:
        return f"[{'|'.join(row.choices)}]"
    return row.metavar or None


def _help(row: Setting) -> str:
    """Return the row's help as a sentence, with its default or that it is repeatable."""
    text = row.help[0].upper() + row.help[1:]
    if row.many:
        return f"{text} (repeatable)."
    if row.default in (None, "auto") or isinstance(row.default, bool):
        return f"{text}."
    default = f"{row.default:g}" if isinstance(row.default, float) else row.default
    return f"{text} (default: {default})."
