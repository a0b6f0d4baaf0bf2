"""`localllm licences`: show the licences of the installed libraries and of the catalog's models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.commands.shared import Json, print_json, table
from localllm.library.catalog import load_catalog
from localllm.plain_output import print_lines

if TYPE_CHECKING:
    from importlib import metadata

_NOT_STATED = "not stated in its metadata"
# Extras that are only needed for development.
_DEVELOPING = ("dev", "docs", "test")
_CLASSIFIER = "License :: OSI Approved :: "


@dataclass(frozen=True, slots=True)
class Terms:
    """The licence of a library or a model. `version` is "" for a model."""

    name: str
    version: str
    licence: str


def licences(
    models: Annotated[
        bool, typer.Option("--models", help="Also the licences of the catalog's models.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the licences of localllm and its libraries, and with --models of the catalog's models.

    The model's own terms apply: the catalog's entry helps to find them and is no legal advice.
    """
    libraries = list(installed("localllm"))
    known = []
    if models:
        for model in load_catalog().models:
            licence = model.licence or "unknown: see its page on the hub"
            known.append(Terms(model.name, "", licence))
    body = {"libraries": [asdict(x) for x in libraries], "models": [asdict(x) for x in known]}
    rows = [(f"{x.name} {x.version}", x.licence) for x in libraries]
    if known:
        rows += [("", ""), *((x.name, x.licence) for x in known)]
    if as_json:
        print_json(body)
    else:
        print_lines(table(rows).splitlines())


def installed(root: str) -> Iterator[Terms]:
    """Yield `root` and all its installed requirements, including those of the registered backends,
    by name.

    Requirements of our extras are included if they are installed.
    """
    from importlib import metadata

    from localllm_backends import registry

    found: dict[str, Terms] = {}
    backends = metadata.entry_points(group=registry.GROUP)
    waiting = [root, *(backend.dist.name for backend in backends if backend.dist is not None)]
    while waiting:
        name = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if key in found:
            continue
        found[key] = Terms(distribution.name, distribution.version, licence_of(distribution))
        for requirement in distribution.requires or []:
            needed = re.match(r"[\w.-]+", requirement)
            # Requirements of an extra count only if it is one of our runtime extras. Extras of
            # libraries don't count.
            extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
            if needed and (extra is None or (key == root and extra[1] not in _DEVELOPING)):
                waiting.append(needed[0])
    yield from (found[key] for key in sorted(found))


def licence_of(distribution: metadata.Distribution) -> str:
    """Return the licence in the metadata: the expression, or the classifiers, or the field's first
    line."""
    fields = distribution.metadata.json
    if expression := fields.get("license_expression"):
        return str(expression)
    classified = [
        c.removeprefix(_CLASSIFIER)
        for c in fields.get("classifier", [])
        if c.startswith(_CLASSIFIER)
    ]
    if classified:
        return ", ".join(classified)
    first = str(fields.get("license") or "").strip().partition("\n")[0].strip()
    if first and first != "UNKNOWN":
        return first
    return _NOT_STATED
