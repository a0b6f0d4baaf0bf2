"""A figure that several pages of the docs contain is the same on all pages and in the code."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.cli.editors.recipes import RECIPES
from localllm.engine.speculation import controller

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """Return a page as one line of text."""
    return " ".join((ROOT / name).read_text("utf-8").split())


def found(pattern: str, name: str) -> tuple[str, ...]:
    match = re.search(pattern, page(name))
    assert match is not None, f"{name} lacks {pattern}"
    return match.groups()


def test_drafting_gains_in_the_docs_match_the_benchmarks() -> None:
    row = r"copy-edit, one stream, tok/s \(more is better\) \| [\d.]+ \| [\d.]+ \| ([\d.]+)× "
    (copying,) = found(row, "docs/benchmarks.md")
    (prose,) = found(
        r"decode, one stream, tok/s \(more is better\) \| [\d.]+ \| [\d.]+ \| ([\d.]+)× ",
        "docs/benchmarks.md",
    )
    assert found(r"one edit ran at ([\d.]+) ×, prose at ([\d.]+) ×", "README.md") == (
        copying,
        prose,
    )
    assert found(r"\(`ngram`\) \| ([\d.]+) × the speed", "docs/guide/speculation.md") == (copying,)
    assert found(r"free prose \| [^|]+\| ([\d.]+) ×", "docs/guide/speculation.md") == (prose,)


def test_the_docs_describe_the_drafting_trial_correctly() -> None:
    (most,) = found(r"verify 1 to (\d+) tokens", "docs/guide/speculation.md")
    assert int(most) == controller.TRIAL_ROWS[-1]
    (cost,) = found(r"8 rows cost about as much as ([\d.]+) single", "docs/guide/speculation.md")
    assert found(r"eight rows cost about ([\d.]+) single", "docs/drafting.md") == (cost,)


def test_the_number_of_client_loops_is_the_sum_of_its_table_and_on_one_page() -> None:
    complete, tried = found(r"\d{4}-\d\d-\d\d: (\d+) of (\d+) loops complete", "docs/clients.md")
    table = (ROOT / "docs/clients.md").read_text("utf-8").partition("loops complete.")[2]
    rows = re.findall(r"^\|[^|]+\|[^|]+\|[^|]+\| (\d+) of (\d+) \|", table, re.M)
    assert sum(int(done) for done, _ in rows) == int(complete)
    assert sum(int(of) for _, of in rows) == int(tried)
    assert not re.search(r"\d+ of \d+ loops", page("docs/guide/editors.md"))


def test_the_docs_list_exactly_the_programs_that_connect_and_run_know() -> None:
    (known,) = found(r"`connect` knows (\d+) programs", "docs/guide/editors.md")
    assert int(known) == len(RECIPES)
    (listed,) = found(r"It knows ([^.(]+)\.", "docs/guide/editors.md")
    names = set(re.split(r", | and ", listed))
    refused = CliRunner().invoke(app, ["run", "no-such-agent"])
    (startable,) = re.findall(r"known: (.+)", str(refused.exception))
    assert names == set(startable.split(", "))
