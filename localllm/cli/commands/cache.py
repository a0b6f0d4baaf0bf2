"""`localllm cache`: show and clear the prefixes cached on disk, and the bytes written today, by
model."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm import paths
from localllm.cli.commands.shared import Json, Yes, calls_command, confirmed, print_json, table
from localllm.errors import LocalLLMError, ModelNotFoundError
from localllm.formatting import byte_size
from localllm.plain_output import print_lines
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.cli.cached_prefixes import ModelPrefixes

app = typer.Typer(
    name="cache", help="Cached prefixes on disk.", rich_markup_mode=None, add_completion=False
)


@app.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: Json = False) -> None:
    """Show the prefixes cached on disk: their folder, their size and their models.

    Cached prefixes of earlier prompts save computing them again.
    """
    if calls_command(context, as_json=as_json):
        return
    from localllm.cli.cached_prefixes import survey

    root = paths.prefixes_dir()
    prefixes = survey(root)
    body = _body(str(root), prefixes)
    if as_json:
        print_json(body)
    else:
        print_lines(_lines(body, prefixes))


@app.command()
def clear(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Only this model's (default: all)."),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove cached prefixes from the disk. This is safe while a server runs.

    The server keeps the prefixes in its memory, and fills the disk again.
    """

    from localllm.cli.cached_prefixes import clear as remove
    from localllm.cli.cached_prefixes import survey

    prefixes = survey(paths.prefixes_dir())
    chosen = prefixes
    if model is not None:
        chosen = _prefixes_of(model, prefixes)
    n_files = sum(m.n_files for m in chosen)
    size_text = byte_size(sum(m.size_bytes for m in chosen))
    names = ", ".join(sorted({_name(m) for m in chosen}))
    if n_files and not yes and not confirmed(f"remove {n_files} file(s), {size_text}, of {names}?"):
        return
    sizes, n_left = remove(chosen)
    if as_json:
        print_json({"removed_files": len(sizes), "freed_bytes": sum(sizes), "left_files": n_left})
    else:
        print(f"{len(sizes)} file(s) removed, {byte_size(sum(sizes))} freed", file=sys.stderr)
    if n_left:
        raise LocalLLMError(
            f"{n_left} file(s) could not be removed",
            hint="another program has them open, or they belong to another user: end that "
            "program, then try again",
        )


def _prefixes_of(name: str, prefixes: list[ModelPrefixes]) -> list[ModelPrefixes]:
    """Return the folders of one model, by its name or by the folder's name if the model is
    unknown."""

    chosen = [m for m in prefixes if name.lower() in (_name(m).lower(), m.folder.name.lower())]
    if not chosen:
        hint = "the cache is empty"
        if prefixes:
            hint = f"cached are: {', '.join(sorted({_name(m) for m in prefixes}))}"
        raise ModelNotFoundError(f"nothing is cached for {name}", hint=hint)
    return chosen


def _name(model: ModelPrefixes) -> str:
    return model.model or model.folder.name


_LIMIT_SETTINGS = {
    "capacity_bytes": "cache_disk_gb",
    "daily_bytes": "cache_disk_daily_gb",
    "free_bytes": "cache_disk_free_gb",
}


def _body(folder: str, prefixes: list[ModelPrefixes]) -> dict[str, Any]:
    """Return everything that --json prints."""
    settings = Settings()
    limits = {key: int(settings.value(name) * 1e9) for key, name in _LIMIT_SETTINGS.items()}
    written_bytes = sum(m.written_today_bytes for m in prefixes)
    models = [
        {
            "model": m.model,
            "folder": m.folder.name,
            "files": m.n_files,
            "bytes": m.size_bytes,
            "written_today_bytes": m.written_today_bytes,
            "last_used_s": m.used_s,
        }
        for m in prefixes
    ]
    return {
        "folder": folder,
        "files": sum(m.n_files for m in prefixes),
        "bytes": sum(m.size_bytes for m in prefixes),
        "written_today_bytes": written_bytes,
        "daily_limit_used_up": 0 < limits["daily_bytes"] <= written_bytes,
        "limits": limits,
        "models": models,
    }


def _lines(body: dict[str, Any], prefixes: list[ModelPrefixes]) -> list[str]:
    limits = body["limits"]
    limit_text = "and none are stored (cache_disk_gb is 0)"
    if limits["capacity_bytes"] > 0:
        limit_text = f"of {byte_size(limits['capacity_bytes'])}"
    written_text = f"{byte_size(body['written_today_bytes'])} of prefixes"
    if limits["daily_bytes"] > 0:
        written_text += f", of {byte_size(limits['daily_bytes'])} a day"
    if body["daily_limit_used_up"]:
        written_text += ": used up, so new prefixes stay in memory until tomorrow"
    lines = [
        f"folder         {body['folder']}",
        f"kept           {byte_size(body['bytes'])} {limit_text}, {body['files']} file(s)",
        f"written today  {written_text}",
        f"kept free      {byte_size(limits['free_bytes'])} of the disk",
    ]
    if not prefixes:
        return [*lines, "", "no prefix is stored yet"]
    head = ("MODEL", "FILES", "SIZE", "WRITTEN TODAY", "LAST USED")
    rows = [
        (
            _name(m),
            str(m.n_files),
            byte_size(m.size_bytes),
            byte_size(m.written_today_bytes),
            _time_text(m.used_s),
        )
        for m in prefixes
    ]
    return [*lines, "", table([head, *rows], right_aligned=(1, 2, 3))]


def _time_text(used_s: float | None) -> str:
    if used_s is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(used_s))
