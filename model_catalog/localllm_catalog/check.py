"""Check that all family files (and the user's, in DIR) are complete and consistent: `python -m
localllm_catalog.check [DIR]`."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from localllm_catalog import catalog, shapes
from localllm_catalog.errors import CatalogError
from localllm_catalog.names import Format
from localllm_catalog.types import Model

# If the count from shapes differs from the stated one by more than this, the file must explain it
# (params_note).
TOLERANCE = 0.03
_DATE = re.compile(r"20[0-9]{2}-[01][0-9](-[0-3][0-9])?")


def problems(user_dir: Path | None = None) -> Iterator[str]:
    """Yield the catalog's problems, one line each."""
    cited: set[str] = set()
    user_files = sorted(user_dir.glob("*.toml")) if user_dir else []
    for path in [*catalog.shipped_files()[1:], *user_files]:
        for table in catalog.read_family(path):
            files = itertools.chain.from_iterable(
                table.get(model_format, ()) for model_format in Format
            )
            cited |= {entry["source"] for entry in files if "source" in entry}
            cited |= set(table.get("quality", ()))
    defined = set(catalog.read_sources())
    yield from (f"sources.toml: {label} is used by no family" for label in sorted(defined - cited))
    yield from (f"sources.toml does not define {label!r}" for label in sorted(cited - defined))
    whole_catalog = catalog.load(user_dir)
    for model in whole_catalog.models:
        yield from (f"{model.id}: {problem}" for problem in _model_problems(model, whole_catalog))


def _model_problems(model: Model, whole_catalog: catalog.Catalog) -> Iterator[str]:
    yield from _count_problems(model)
    yield from _file_problems(model)
    if not _DATE.fullmatch(model.release_date):
        yield f"release_date is {model.release_date!r}, not a month or a day (2026-01, 2026-01-31)"
    for draft in model.drafts:
        draft_model = whole_catalog.get(draft)
        if draft_model is None or draft_model.tokenizer_family != model.tokenizer_family:
            yield f"its draft {draft} is missing or has another tokenizer"
        elif draft_model.params_total >= model.params_total:
            yield f"its draft {draft} is no smaller"


def _count_problems(model: Model) -> Iterator[str]:
    """Compare the stated parameters with the count from shapes."""
    total, active = shapes.count_params(model)
    stated_active = model.params_active != model.params_total
    comparisons = [("", total, model.params_total)]
    if stated_active:
        comparisons.append(("active ", active, model.params_active))
    for kind, count, stated in comparisons:
        if abs(count / stated - 1) > TOLERANCE and not model.params_note:
            yield (
                f"its shapes give {count:,} {kind}parameters, {stated:,} are stated; explain it "
                "in params_note"
            )
    if model.experts is not None and not stated_active:
        yield "has experts but does not state `active`"


def _file_problems(model: Model) -> Iterator[str]:
    if not model.variants:
        yield "has no files to download"
    names = [(variant.format, variant.quant) for variant in model.variants]
    for duplicate in {name for name in names if names.count(name) > 1}:
        yield f"has two variants {' '.join(duplicate)}; keep one"


def main(arguments: list[str]) -> int:
    """Print the problems to stderr and return 1, or print a one-line summary and return 0."""
    user_dir = None
    if arguments:
        user_dir = Path(arguments[0])
    try:
        problem_lines = list(problems(user_dir))
    except CatalogError as error:
        problem_lines = [error.message]
    if problem_lines:
        print("\n".join(problem_lines), file=sys.stderr)
        return 1
    models = catalog.load(user_dir).models
    families = {model.family for model in models}
    n_variants = sum(len(model.variants) for model in models)
    summary = f"{len(models)} models in {len(families)} families, {n_variants} variants"
    print(f"catalog: {summary}, all consistent")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
