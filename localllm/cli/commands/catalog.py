"""`localllm catalog update`: update the catalog's file listings from the hub."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.setting_options import with_setting_options
from localllm.errors import UsageError
from localllm.library.catalog import load_catalog, user_folder
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.library.catalog_update import Update
    from localllm_catalog.types import Model

app = typer.Typer(no_args_is_help=True)


@app.callback()
def catalog() -> None:
    """Update the catalog's listings."""


@app.command(short_help="Read the models' file listings from the hub.")
@with_setting_options("offline", "measured_rows")
def update(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL…]",
            help="Models to update (default: all); ORG/NAME-GGUF adds a new one.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change; write nothing.")
    ] = False,
    *,
    settings: Settings,
) -> None:
    """Read the current files of the catalog's models from the hub, with exact sizes, and the speeds
    that others measured (`measured_rows`).

    The result is stored in your own catalog file. A GGUF repository that is not in the catalog is
    added as a new model. Its shapes, template and sampling come from the header of its smallest
    file.
    """

    from localllm.library import catalog_update, hub
    from localllm.library.describe import describe

    if settings.value("offline") or hub.is_offline():
        raise UsageError(
            "the catalog can't be updated offline",
            hint="run it without --offline, the setting `offline` and HF_HUB_OFFLINE",
        )
    catalog_now = load_catalog()
    new_repos: list[str] = []
    known_models: list[Model] = []
    for name in models or ():
        model = catalog_now.recognise(name)
        if model is not None:
            known_models.append(model)
        elif "/" in name:
            new_repos.append(name)
        else:
            model, _ = describe(name, catalog_now)
            known_models.append(model)
    if not models:
        known_models = list(catalog_now.models)
    print(
        f"reading the hub's listings of {len(known_models) + len(new_repos)} models …",
        file=sys.stderr,
    )
    update_of_catalog = catalog_update.read(known_models, hub.list_files)
    for repo in new_repos:
        catalog_update.add(repo, hub.list_files, update_of_catalog)
    _print_changes(update_of_catalog)
    if not dry_run:
        print(f"wrote {catalog_update.write(update_of_catalog, user_folder())}", file=sys.stderr)
    rows_file = settings.value("measured_rows")
    if rows_file:
        _update_rows(rows_file, dry_run=dry_run)


def _update_rows(rows_file: str, *, dry_run: bool) -> None:
    """Read the speeds that others measured from the file at `rows_file`."""
    from localllm.library import small_file
    from localllm.load import measured_by_others

    rows, n_invalid = measured_by_others.rows_of(small_file.read(rows_file))
    if not rows:
        raise UsageError(
            f"{rows_file} has no row of a measurement",
            hint="it needs a line of `localllm bench --share` for each, with its `source`",
        )
    n_sources = len({row.source for row in rows})
    print(f"speeds measured by others: {len(rows)} (sources: {n_sources})")
    if n_invalid:
        print(f"left out: {n_invalid} lines that are no measurement", file=sys.stderr)
    if not dry_run:
        print(f"wrote {measured_by_others.write(rows)}", file=sys.stderr)


def _print_changes(update: Update) -> None:
    for change in update.changes:
        print(change.model.name)
        for line in change.lines:
            print(f"  {line}")
    for repo, reason in update.unread.items():
        print(f"not read: {repo}: {reason}", file=sys.stderr)
    if not update.changes:
        print("nothing changed")
