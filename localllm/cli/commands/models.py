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

    found = store.everything()
    if not found and not as_json:
        print(
            "no model is on this disk yet: see `localllm recommend`, then `localllm pull ID`",
            file=sys.stderr,
        )
    _print_models(found, as_json=as_json)


def _print_models(found: list[LocalModel], *, as_json: bool) -> None:
    """Print the models, and name those that can't be loaded."""
    whole = [model for model in found if not model.fault]
    faulty = [model for model in found if model.fault]
    if as_json:
        left_out = [as_row(model) for model in faulty]
        print_json({"models": [as_row(model) for model in whole], "left_out": left_out})
        return
    print_lines(listing(whole))
    for model in faulty:
        print(plain(f"not listed: {model.path}: {model.fault}"), file=sys.stderr)
    for model in whole:
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
    total = sum(m.size_bytes for m in chosen)
    listed = ", ".join(f"{m.name} {m.quant}".strip() for m in chosen)
    if not yes and not confirmed(f"remove {listed} ({byte_size(total)})?"):
        return
    freed = {f"{m.name} {m.quant}".strip(): store.rm(m) for m in chosen}
    if as_json:
        print_json({"removed": [as_row(m) for m in chosen], "freed_bytes": sum(freed.values())})
    elif not quiet:
        for name, n_bytes in freed.items():
            print(f"removed {name}: {byte_size(n_bytes)} freed", file=sys.stderr)


def _only_one(ref: str, found: list[LocalModel]) -> LocalModel:
    """Return the one model to remove.

    If several match, only those that can be removed here count. Raises UsageError if that leaves more
    than one.
    """

    ours = [m for m in found if m.origin in ("hf-cache", "quantised")] or found
    if len(ours) > 1:
        raise UsageError(
            f"{ref} names {len(ours)} models",
            hint="name one of them: " + ", ".join(sorted(m.ref for m in ours)),
        )
    return ours[0]


@app.command()
def du(as_json: Json = False) -> None:
    """Show disk space by app. Shared files count once."""

    usage = store.du()
    total = sum(u.size_bytes for u in usage)
    if as_json:
        print_json({"usage": [asdict(u) for u in usage], "total_bytes": total})
        return
    rows = [("HELD BY", "MODELS", "SIZE")]
    rows += [(u.origin, str(u.n_models), byte_size(u.size_bytes)) for u in usage]
    rows.append(("total", "", byte_size(total)))
    print_lines(table(rows, right=(1, 2)).splitlines())


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

    wanted = []
    for ref in refs or ():
        wanted += find(ref)
    if not refs:
        wanted = store.everything()
    results = []
    reading = TerminalLine(sys.stderr)
    for model in wanted:
        if not quiet:
            reading.show(f"reading {model.name} ({byte_size(model.size_bytes)}) …")
        results.append(store.verify(model))
        reading.show("")
        if not as_json and not (quiet and results[-1].result != "bad"):
            print_lines([_verdict(results[-1])])
            sys.stdout.flush()
    if as_json:
        rows = [
            {**as_row(r.model), "result": r.result, "detail": r.detail, "fix": _fix(r)}
            for r in results
        ]
        print_json({"models": rows})
    if any(r.result == "bad" for r in results):
        raise typer.Exit(ModelFileError.exit_code)


def _verdict(checked: Any) -> str:
    name = f"{checked.model.name} {checked.model.quant}".strip()
    if checked.result == "ok":
        return f"ok     {name}: hash as published"
    if checked.result == "whole":
        return (
            f"whole  {name}: its published hash is unknown; "
            "its files have the size in their headers"
        )
    return f"BAD    {name}: {checked.detail}\n       {checked.model.path}\n       {_fix(checked)}"


def _fix(checked: Any) -> str:
    """Return the command that repairs a bad model; "" for other results."""
    if checked.result != "bad":
        return ""
    if checked.model.origin != "hf-cache":
        return "download it again with the program that downloaded it"
    return f"`localllm pull {checked.model.ref}` downloads it again"


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
    freed = 0
    if removes and (yes or confirmed(f"remove {len(waste)} file(s), {total}?")):
        freed = store.prune(waste)
    if as_json:
        rows = [{"path": str(w.path), "bytes": w.size_bytes, "why": w.why} for w in waste]
        print_json({"found": rows, "freed_bytes": freed})
        return
    if quiet:
        return
    text = f"{total} could be freed"
    if removes:
        text = f"{byte_size(freed)} freed"
    print(text, file=sys.stderr)


@app.command()
def adopt(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with your own models.")],
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove FOLDER from the list; its files stay.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Use a folder's models in place, without copying. (Models of other apps are used anyway.)"""
    found: list[LocalModel] = []
    if forget:
        store.forget(folder)
        print(plain(f"{folder} is no longer used; its files stay"), file=sys.stderr)
    else:
        found = store.adopt(folder)
    _print_models(found, as_json=as_json)
