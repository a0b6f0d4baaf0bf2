"""`localllm catalog update`: update the catalog's file listings from the hub."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.setting_options import takes
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
@takes("offline", "measured_rows")
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
    known = load_catalog()
    new: list[str] = []
    wanted: list[Model] = []
    for name in models or ():
        model = known.recognise(name)
        if model is not None:
            wanted.append(model)
        elif "/" in name:
            new.append(name)
        else:
            model, _ = describe(name, known)
            wanted.append(model)
    if not models:
        wanted = list(known.models)
    print(f"reading the hub's listings of {len(wanted) + len(new)} models …", file=sys.stderr)
    found = catalog_update.read(wanted, hub.list_files)
    for repo in new:
        catalog_update.add(repo, hub.list_files, found)
    _print_changes(found)
    if not dry_run:
        print(f"wrote {catalog_update.write(found, user_folder())}", file=sys.stderr)
    place = settings.value("measured_rows")
    if place:
        _update_rows(place, dry_run=dry_run)


def _update_rows(place: str, *, dry_run: bool) -> None:
    """Read the speeds that others measured from the file at `place`."""
    from localllm.library import small_file
    from localllm.load import measured_by_others

    rows, n_left_out = measured_by_others.rows_of(small_file.read(place))
    if not rows:
        raise UsageError(
            f"{place} has no row of a measurement",
            hint="it needs a line of `localllm bench --share` for each, with its `source`",
        )
    n_sources = len({row.source for row in rows})
    print(f"speeds measured by others: {len(rows)} (sources: {n_sources})")
    if n_left_out:
        print(f"left out: {n_left_out} lines that are no measurement", file=sys.stderr)
    if not dry_run:
        print(f"wrote {measured_by_others.write(rows)}", file=sys.stderr)


def _print_changes(found: Update) -> None:
    for change in found.changes:
        print(change.model.name)
        for line in change.lines:
            print(f"  {line}")
    for repo, reason in found.unread.items():
        print(f"not read: {repo}: {reason}", file=sys.stderr)
    if not found.changes:
        print("nothing changed")
