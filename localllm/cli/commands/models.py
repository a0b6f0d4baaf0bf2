"""`localllm models`: manage models on this disk: list, info, rm, du, verify, prune, adopt."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.commands.models_view import as_row, facts, info_lines, listing
from localllm.cli.commands.shared import (
    Json,
    Quiet,
    Yes,
    calls_command,
    confirmed,
    print_json,
    table,
)
from localllm.errors import ModelFileError, ModelNotFoundError, UsageError
from localllm.formatting import byte_size
from localllm.library import store
from localllm.library.catalog import load_catalog, open_model
from localllm.library.installed_names import catalog_model
from localllm.library.resolve import find
from localllm.plain_output import TerminalLine, plain, print_lines

if TYPE_CHECKING:
    from localllm.library.types import LocalModel

app = typer.Typer(
    name="models", help="Models on this disk.", rich_markup_mode=None, add_completion=False
)


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the installed models if no command is given."""
    if not calls_command(context, as_json=as_json):
        list_models(as_json=as_json)


@app.command("list", short_help="All models on this disk, including other applications'.")
def list_models(as_json: Json = False) -> None:
    """List every model on this disk: hub's cache, LM Studio, Ollama, llama.cpp, adopted folders."""

    installed = store.everything()
    if not installed and not as_json:
        print(
            "no model is on this disk yet: see `localllm recommend`, then `localllm pull ID`",
            file=sys.stderr,
        )
    _print_models(installed, as_json=as_json)


def _print_models(installed: list[LocalModel], *, as_json: bool) -> None:
    """Print the models, and name those that can't be loaded."""
    usable = [model for model in installed if not model.fault]
    faulty = [model for model in installed if model.fault]
    if as_json:
        left_out = [as_row(model) for model in faulty]
        print_json({"models": [as_row(model) for model in usable], "left_out": left_out})
        return
    print_lines(listing(usable))
    for model in faulty:
        print(plain(f"not listed: {model.path}: {model.fault}"), file=sys.stderr)
    for model in usable:
        if model.mmproj_fault:
            why = f"{model.mmproj}: {model.mmproj_fault}"
            print(plain(f"{model.name} reads no images: {why}"), file=sys.stderr)


@app.command(short_help="Show a model's facts and the paths of its files.")
def info(
    ref: Annotated[
        str, typer.Argument(metavar="MODEL", help="Installed name, catalog id, or path.")
    ],
    as_json: Json = False,
) -> None:
    """Show a model's properties and files. For a catalog model that is not installed: its
    variants."""
    from localllm.library.resolve import resolve

    catalog = load_catalog()
    local: LocalModel | None = None
    try:
        local = resolve(ref, catalog=catalog)
    except ModelNotFoundError:
        known, _ = catalog_model(ref.rpartition("/")[2], catalog)
        if known is None:
            raise
    else:
        opened = open_model(local, catalog)
        known = opened.model or catalog.recognise(local.name, local.repo)
        local = replace(local, fault=local.fault or opened.fault)
    if as_json:
        row = None if local is None else as_row(local)
        print_json({"model": facts(known), "local": row})
    else:
        print_lines(info_lines(known, local))


@app.command()
def rm(
    refs: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Model to remove (NAME or NAME:QUANT).")
    ],
    yes: Yes = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove models from the hub's cache, and quants made here. Other apps' models stay."""

    chosen: list[LocalModel] = []
    for ref in refs:
        model = _only_one(ref, find(ref))
        if model not in chosen:
            chosen.append(model)
    for model in chosen:
        store.check_removable(model)
    total_bytes = sum(local.size_bytes for local in chosen)
    names = ", ".join(f"{local.name} {local.quant}".strip() for local in chosen)
    if not yes and not confirmed(f"remove {names} ({byte_size(total_bytes)})?"):
        return
    freed = {f"{local.name} {local.quant}".strip(): store.rm(local) for local in chosen}
    if as_json:
        print_json(
            {"removed": [as_row(local) for local in chosen], "freed_bytes": sum(freed.values())}
        )
    elif not quiet:
        for name, n_bytes in freed.items():
            print(f"removed {name}: {byte_size(n_bytes)} freed", file=sys.stderr)


def _only_one(ref: str, matches: list[LocalModel]) -> LocalModel:
    """Return the one model to remove.

    If several match, only those that can be removed here count. Raises UsageError if that leaves more
    than one.
    """

    removable = [m for m in matches if m.origin in ("hf-cache", "quantised")] or matches
    if len(removable) > 1:
        raise UsageError(
            f"{ref} names {len(removable)} models",
            hint="name one of them: " + ", ".join(sorted(m.ref for m in removable)),
        )
    return removable[0]


@app.command()
def du(as_json: Json = False) -> None:
    """Show disk space by app. Shared files count once."""

    usage = store.du()
    total = sum(entry.size_bytes for entry in usage)
    if as_json:
        print_json({"usage": [asdict(entry) for entry in usage], "total_bytes": total})
        return
    rows = [("HELD BY", "MODELS", "SIZE")]
    rows += [(entry.origin, str(entry.n_models), byte_size(entry.size_bytes)) for entry in usage]
    rows.append(("total", "", byte_size(total)))
    print_lines(table(rows, right_aligned=(1, 2)).splitlines())


@app.command()
def verify(
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Models to check (default: all)."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Read models and compare their hashes with the published ones. Exit code 4 if any is bad."""

    to_verify = []
    for ref in refs or ():
        to_verify += find(ref)
    if not refs:
        to_verify = store.everything()
    results = []
    progress_line = TerminalLine(sys.stderr)
    for model in to_verify:
        if not quiet:
            progress_line.show(f"reading {model.name} ({byte_size(model.size_bytes)}) …")
        results.append(store.verify(model))
        progress_line.show("")
        if not as_json and not (quiet and results[-1].result != "bad"):
            print_lines([_verdict(results[-1])])
            sys.stdout.flush()
    if as_json:
        rows = [
            {
                **as_row(result.model),
                "result": result.result,
                "detail": result.detail,
                "fix": _fix(result),
            }
            for result in results
        ]
        print_json({"models": rows})
    if any(result.result == "bad" for result in results):
        raise typer.Exit(ModelFileError.exit_code)


def _verdict(result: Any) -> str:
    name = f"{result.model.name} {result.model.quant}".strip()
    if result.result == "ok":
        return f"ok     {name}: hash as published"
    if result.result == "whole":
        return (
            f"whole  {name}: its published hash is unknown; "
            "its files have the size in their headers"
        )
    return f"BAD    {name}: {result.detail}\n       {result.model.path}\n       {_fix(result)}"


def _fix(result: Any) -> str:
    """Return the command that repairs a bad model; "" for other results."""
    if result.result != "bad":
        return ""
    if result.model.origin != "hf-cache":
        return "download it again with the program that downloaded it"
    return f"`localllm pull {result.model.ref}` downloads it again"


@app.command(short_help="Remove unfinished downloads and unused files.")
def prune(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    yes: Yes = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove unfinished downloads and files that no model uses from the hub's cache."""

    waste = store.waste()
    total = byte_size(sum(w.size_bytes for w in waste))
    if not as_json and not quiet:
        for item in waste:
            print_lines([f"{byte_size(item.size_bytes):>9}  {item.why}: {item.path}"])
    removes = bool(waste) and not dry_run
    freed_bytes = 0
    if removes and (yes or confirmed(f"remove {len(waste)} file(s), {total}?")):
        freed_bytes = store.prune(waste)
    if as_json:
        rows = [{"path": str(w.path), "bytes": w.size_bytes, "why": w.why} for w in waste]
        print_json({"found": rows, "freed_bytes": freed_bytes})
        return
    if quiet:
        return
    summary = f"{total} could be freed"
    if removes:
        summary = f"{byte_size(freed_bytes)} freed"
    print(summary, file=sys.stderr)


@app.command()
def adopt(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with your own models.")],
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove FOLDER from the list; its files stay.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Use a folder's models in place, without copying. (Models of other apps are used anyway.)"""
    installed: list[LocalModel] = []
    if forget:
        store.forget(folder)
        print(plain(f"{folder} is no longer used; its files stay"), file=sys.stderr)
    else:
        installed = store.adopt(folder)
    _print_models(installed, as_json=as_json)
