"""`localllm config`: every setting, its value now, and where that came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_SECRET = frozenset({"api_key"})


def config(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the settings: value, where it comes from, and the names to change it by. Keys are never shown."""
    import json
    import sys

    from localllm import paths

    rows = settings_now()
    path = paths.config_dir() / "config.toml"
    if json_:
        print(json.dumps({"config_file": str(path), "settings": rows}, indent=2))
        return
    shown = [(r["name"], _said(r["value"]), r["origin"], r["help"]) for r in rows]
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    for name, value, origin, about in shown:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin:{widths[2]}}  {about}")
    there = "" if path.exists() else " (not there yet)"
    print(f"\nset them in {path}{there}, by LOCALLLM_NAME in the environment, or by flags", file=sys.stderr)


def settings_now() -> list[dict[str, Any]]:
    """One entry per setting. Raises UsageError for a value that can't be read, naming where it stands."""
    from localllm.settings import TABLE, Settings

    settings = Settings()
    return [
        {
            "name": s.name,
            "value": "(set)" if s.name in _SECRET and settings.value(s.name) is not None else settings.value(s.name),
            "origin": settings[s.name].origin,
            "default": s.default,
            "environment": s.env,
            "choices": list(s.choices),
            "help": s.help,
        }
        for s in TABLE
    ]


def _said(value: Any) -> str:
    return "automatic" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
