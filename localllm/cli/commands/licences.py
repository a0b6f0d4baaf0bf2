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
_DEVELOPMENT_EXTRAS = ("dev", "docs", "test")
_CLASSIFIER = "License :: OSI Approved :: "


@dataclass(frozen=True, slots=True)
class Licence:
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
    model_licences = []
    if models:
        for model in load_catalog().models:
            licence = model.licence or "unknown: see its page on the hub"
            model_licences.append(Licence(model.name, "", licence))
    body = {
        "libraries": [asdict(entry) for entry in libraries],
        "models": [asdict(entry) for entry in model_licences],
    }
    rows = [(f"{entry.name} {entry.version}", entry.licence) for entry in libraries]
    if model_licences:
        rows += [("", ""), *((entry.name, entry.licence) for entry in model_licences)]
    if as_json:
        print_json(body)
    else:
        print_lines(table(rows).splitlines())


def installed(root: str) -> Iterator[Licence]:
    """Yield `root` and all its installed requirements, including those of the registered backends,
    by name.

    Requirements of our extras are included if they are installed.
    """
    from importlib import metadata

    from localllm_backends import registry

    licences_by_name: dict[str, Licence] = {}
    backends = metadata.entry_points(group=registry.GROUP)
    queue = [root, *(backend.dist.name for backend in backends if backend.dist is not None)]
    while queue:
        name = queue.pop()
        normalised = re.sub(r"[-_.]+", "-", name).lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if normalised in licences_by_name:
            continue
        licences_by_name[normalised] = Licence(
            distribution.name, distribution.version, licence_of(distribution)
        )
        for requirement in distribution.requires or []:
            required = re.match(r"[\w.-]+", requirement)
            # Requirements of an extra count only if it is one of our runtime extras. Extras of
            # libraries don't count.
            extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
            if required and (
                extra is None or (normalised == root and extra[1] not in _DEVELOPMENT_EXTRAS)
            ):
                queue.append(required[0])
    yield from (licences_by_name[normalised] for normalised in sorted(licences_by_name))


def licence_of(distribution: metadata.Distribution) -> str:
    """Return the licence in the metadata: the expression, or the classifiers, or the field's first
    line."""
    fields = distribution.metadata.json
    if expression := fields.get("license_expression"):
        return str(expression)
    classifiers = [
        classifier.removeprefix(_CLASSIFIER)
        for classifier in fields.get("classifier", [])
        if classifier.startswith(_CLASSIFIER)
    ]
    if classifiers:
        return ", ".join(classifiers)
    first_line = str(fields.get("license") or "").strip().partition("\n")[0].strip()
    if first_line and first_line != "UNKNOWN":
        return first_line
    return _NOT_STATED
