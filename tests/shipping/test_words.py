"""Rules for the docs: short sentences, terms of the field, every page linked, real settings, and
figures that match the program."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from localllm import paths
from localllm.cli.all_commands import app
from localllm.settings import Settings
from localllm_catalog import catalog

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *GUIDES, *API]
LINK = re.compile(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)")


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of running text and lists, without tables, headings and code."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text):
        if paragraph.lstrip().startswith(("#", "|")):
            continue
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", paragraph))
        yield from (
            s for s in re.split(r"(?<=[.!?])\s+", plain.replace("\n", " ")) if re.search(r"\w", s)
        )


def n_words(sentence: str) -> int:
    return len(re.findall(r"[\w'’-]+", sentence))


def cells(page: Path) -> Iterator[str]:
    for line in re.findall(
        r"^\|(.*)\|$", re.sub(r"`[^`]*`", "code", page.read_text("utf-8")), re.M
    ):
        yield from re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).split("|")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_of_a_page_are_short(page: Path) -> None:
    """No sentence has more than 40 words. In guides, half of the sentences have at most 18."""
    counted = {sentence: n_words(sentence) for sentence in sentences(page)}
    assert [sentence for sentence, n in counted.items() if n > 40] == []
    assert [cell for cell in cells(page) if n_words(cell) > 40] == []
    assert page not in (README, *GUIDES) or median(counted.values()) <= 18


def test_a_changelog_entry_has_at_most_two_sentences() -> None:
    entries = re.findall(r"^\* .*(?:\n  .*)*", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert len(entries) > 50
    told = {
        entry: re.split(r"(?<=[.!?])\s+", re.sub(r"`[^`]*`", "code", entry)) for entry in entries
    }
    assert [
        entry for entry, parts in told.items() if len(parts) > 2 or sum(map(n_words, parts)) > 40
    ] == []


def not_said() -> dict[str, str]:
    """Return the glossary's words to avoid, each with its replacement."""
    table = (
        (ROOT / "docs" / "glossary.md")
        .read_text("utf-8")
        .partition("## Not said")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {banned: said for banned, said in rows if banned not in ("not", "---")}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "glossary.md"], ids=lambda page: page.name
)
def test_the_docs_use_the_fields_terms(page: Path) -> None:
    text = " ".join(sentences(page))
    assert len(not_said()) > 10
    assert [word for word in not_said() if re.search(rf"\b{word}\b", text, re.I)] == []


def test_every_page_is_at_most_two_links_from_the_readme() -> None:
    """At most one page is between README and any other page, and README is short."""
    assert len(README.read_text("utf-8").splitlines()) <= 90

    def linked(page: Path) -> set[Path]:
        return {(page.parent / name).resolve() for name in LINK.findall(page.read_text("utf-8"))}

    first = {page for page in linked(README) if page.is_file()}
    second = set().union(*(linked(page) for page in first))
    assert set(GUIDES) <= first
    assert {page for page in PAGES if page.name != "README.md"} <= first | second


PACKAGES = ["localllm", "backends", "model_catalog", "tui"]
CODE = [
    "",
    "localllm",
    "localllm/server",
    "localllm/cli",
    "localllm/device",
    "localllm/setup",
    "localllm/engine",
]
CODE += [
    "backends",
    "backends/localllm_backends",
    "model_catalog/localllm_catalog",
    "tui/localllm_tui",
]


@pytest.mark.parametrize("name", ["architecture.md", "extending.md", "glossary.md"])
def test_files_and_classes_named_in_the_docs_exist(name: str) -> None:
    """Every file, folder and class that a page about the code names exists."""
    told = re.findall(
        r"`([\w./*-]+|[A-Z]\w+(?:\.\w+)?)(?:\(\))?`", (ROOT / "docs" / name).read_text("utf-8")
    )
    files = {
        word
        for word in told
        if re.search(r"/|\.(py|toml)$", word) and not word.startswith("python -m")
    }
    assert [
        file
        for file in sorted(files)
        if "FAMILY" not in file and not any([*(ROOT / root).glob(file)] for root in CODE)
    ] == []
    code = "\n".join(
        path.read_text("utf-8") for root in PACKAGES for path in (ROOT / root).rglob("*.py")
    )
    classes = {word.partition(".")[0] for word in told if re.match(r"[A-Z][a-z]+[A-Za-z.]*$", word)}
    assert [
        word
        for word in sorted(classes)
        if not re.search(
            rf"^(?:class|type) {word}\b|^{word}\b.* "
            rf"= ",
            code,
            re.M,
        )
    ] == []


def test_counts_in_the_docs_match_the_code() -> None:
    models = catalog.load()
    variants = sum(len(model.variants) for model in models.models)
    assert f"{len(models.models)} models of" in (ROOT / "docs" / "catalog.md").read_text("utf-8")
    assert f"with {variants} downloadable variants" in (ROOT / "docs" / "catalog.md").read_text(
        "utf-8"
    )
    parts = len(
        tomllib.loads((ROOT / "localllm" / "device" / "devices.toml").read_text("utf-8"))["device"]
    )
    assert f"devices.toml`: {parts} parts" in (ROOT / "docs" / "devices.md").read_text("utf-8")
    assert f"any of {parts} known machines" in (ROOT / "docs" / "guide" / "choosing.md").read_text(
        "utf-8"
    )


def settings_shown() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, block in enumerate(
            re.findall(r"```toml\n(.*?)```", page.read_text("utf-8"), flags=re.S)
        ):
            # Blocks of catalog files and of a package are not config.toml.
            if not block.startswith(("[[models]]", "[project")):
                yield f"{page.name} {number}", block


@pytest.mark.parametrize(
    ("where", "block"), [*settings_shown()], ids=lambda part: part if len(part) < 40 else ""
)
def test_settings_in_the_docs_are_valid(where: str, block: str) -> None:
    # The page shows a hash as dots.
    text = block.replace('"…"', f'"{"0" * 64}"')
    tomllib.loads(text)
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(text, encoding="utf-8")
    assert Settings()["port"].automatic  # read without an error, and no other setting is changed


def test_the_table_of_machines_matches_the_output_of_recommend() -> None:
    """docs/guide/how-it-works.md: `localllm recommend --device NAME -m qwen3-8b:Q4_K_M`."""
    page = (ROOT / "docs" / "guide" / "how-it-works.md").read_text("utf-8")
    row = re.compile(
        r"^\| (.+?) \| ([\d,]+) GB/s \| (\d+) tok/s \((\d+)–(\d+)\) \| ([\d,]+) tok/s "
        r"\|$",
        re.M,
    )
    rows = row.findall(page)
    assert len(rows) == 4
    for name, bandwidth, *said in rows:
        result = CliRunner().invoke(
            app, ["recommend", "--device", name, "-m", "qwen3-8b:Q4_K_M", "--json"]
        )
        answer = json.loads(result.stdout)
        decode, prefill = (answer["plans"][0][key] for key in ("decode_tok_s", "prefill_tok_s"))
        now = [round(decode[key]) for key in ("value", "low", "high")]
        assert f"{answer['device']['bandwidth_gbps']['value']:,.0f}" == bandwidth
        assert [int(text.replace(",", "")) for text in said] == [
            *now,
            float(f"{prefill['value']:.3g}"),
        ], name
