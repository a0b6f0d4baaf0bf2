"""The program accepts every command in the README and the docs, and the docs contain every command.

Lines of code blocks that begin with `localllm` go through the real parser, with options and values.
Commands that only read and end at once are run. (`make docs` checks the site and its links.)
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from localllm.cli.all_commands import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "packaging").rglob("*.md")]
)
PROGRAM = re.compile(r"^(\$ )?(\.venv/bin/)?localllm$")
# A remark after a command, which follows a sign or a wide gap.
REMARK = re.compile(r"\s+(#|→).*$|\s{2,}[^-\s].*$")
# Notation that can't be typed: alternatives, optional parts, ellipses.
NOTATION = re.compile(r"[\[\]…]|\w\|\w|\.\.\.")


@dataclass(frozen=True)
class Line:
    """A command on a page, without the program's name. `literal`: it can be typed exactly as
    shown."""

    page: str
    number: int
    words: tuple[str, ...]
    literal: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.number} localllm {' '.join(self.words)}"


def shown(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the `localllm …` commands in a line of shell code."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&<>")
    lexer.commenters = ""
    lexer.whitespace_split = True
    try:
        words = [*lexer]
    except ValueError:
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("|;&<>"):
            if command and PROGRAM.match(command[0]):
                yield tuple(command[1:])
            command = []
        else:
            command.append(word)


def lines() -> Iterator[Line]:
    """Yield every command in a code block, and commands in running text that begin with the
    program's name."""
    for page in PAGES:
        name, inside = str(page.relative_to(ROOT)), False
        for number, text in enumerate(page.read_text("utf-8").splitlines(), 1):
            if text.lstrip().startswith("```"):
                inside = not inside
                continue
            block = inside or text.startswith("    localllm ")
            found = (
                [REMARK.sub("", text.strip().removeprefix("$ "))]
                if block
                else re.findall(
                    r"`(localllm "
                    r"[^`]+)`",
                    text,
                )
            )
            for code in found:
                # Alternatives are words of one command here, not a pipe.
                whole = re.sub(r"(?<=\S)\|(?=\S)", "¦", code)
                for words in shown(whole):
                    restored = tuple(word.replace("¦", "|") for word in words)
                    yield Line(
                        name, number, restored, block and not NOTATION.search(" ".join(restored))
                    )


LINES = [*lines()]
GROUP: Any = get_command(app)


def command_of(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return the command that `words` name, and the remaining words."""
    command, rest = GROUP, words
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def options_of(command: Any) -> set[str]:
    context = command.make_context("localllm", [], resilient_parsing=True)
    return {name for p in command.get_params(context) for name in (*p.opts, *p.secondary_opts)}


def test_the_docs_contain_enough_commands_to_check() -> None:
    assert len(LINES) > 150
    assert {line.page for line in LINES} > {"README.md", "docs/guide/start.md", "docs/chat.md"}


def test_commands_and_options_in_the_docs_exist() -> None:
    wrong = []
    for line in LINES:
        command, rest = command_of(line.words)
        first_is_name = re.fullmatch(r"[a-z-]+", rest[0]) if rest else None
        if command is GROUP and first_is_name and not rest[0].startswith("-"):
            wrong.append(f"{line}: no such command")
        known = options_of(command)
        given = [
            word.partition("=")[0].strip("[]") for word in rest if re.match(r"\[?--?[a-zA-Z]", word)
        ]
        wrong += [
            f"{line}: no option {option}"
            for option in given
            if option not in known and option != "-1"
        ]
    assert wrong == []


def test_literal_commands_in_the_docs_are_parsed() -> None:
    wrong = []
    for line in LINES:
        command, rest = command_of(line.words)
        if not line.literal or command is GROUP or {"-h", "--help"} & {*rest}:
            continue
        try:
            command.make_context("localllm", [*rest])
        except Exception as e:
            wrong.append(f"{line}: {getattr(e, 'format_message', lambda e=e: repr(e))()}")
    assert wrong == []


def test_every_command_is_in_the_docs() -> None:
    def leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        below = {
            name: sub for name, sub in getattr(command, "commands", {}).items() if not sub.hidden
        }
        for name, sub in below.items():
            yield from leaves(sub, (*words, name))
        if not below:
            yield words

    told = {line.words[:n] for line in LINES for n in (1, 2)}
    # Commands such as `localllm connect`, `chat` and `setup` are named in running text.
    assert [words for words in leaves(GROUP, ()) if words not in told] == []


READS_ONLY = ("recommend", "licences", "config", "cache", "catalog", "models", "ls")
NEEDS = re.compile(
    r"FILE|\.gguf|--check|--write|--import|clear|set|unset|edit|rm|prune|adopt|update|verify|MODEL|NAME|CLIENT|info"
)
QUICK = [
    line for line in {line.words: line for line in LINES}.values()
    if line.literal and line.words and line.words[0] in READS_ONLY and not NEEDS.search(" ".join(line.words))
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all commands, so that facts about this machine are measured once."""
    return tmp_path_factory.mktemp("cache")


def of_this_machine(line: Line) -> bool:
    return line.words[0] == "recommend" and not {"--device", "--compare", "--at"} & {*line.words}


@pytest.mark.parametrize(
    "line",
    [pytest.param(x, marks=[pytest.mark.long] if of_this_machine(x) else []) for x in QUICK],
    ids=str,
)
def test_read_only_commands_in_the_docs_work(
    line: Line, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(cache))
    done = CliRunner().invoke(app, [*line.words])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    assert done.output.strip()
    assert [*tmp_path.iterdir()] == [], "reading writes nothing where one stands"


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
CITING = ("--rounds", "--scenarios", "--only")


def cited_figures() -> Iterator[tuple[str, str]]:
    """Yield the figures that pages cite from `benchmarks.peers`: the README's table, and the
    guide's rows that name one of its commands."""
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme.split("| | localllm | llama-server |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        for figure in NUMBER.findall(" ".join(row.split("|")[1:])):
            yield "README.md", figure
    for row in (ROOT / "docs/guide/ours.md").read_text("utf-8").splitlines():
        cell = row.rstrip(" |").rpartition("|")[2]
        if any(option in cell for option in CITING):
            for figure in NUMBER.findall(re.sub(r"`[^`]*`", "", cell)):
                yield "docs/guide/ours.md", figure


def test_every_figure_compared_with_a_peer_is_in_the_benchmarks() -> None:
    measured = [
        float(number.replace(",", ""))
        for number in NUMBER.findall((ROOT / "docs/benchmarks.md").read_text("utf-8"))
    ]
    figures = [*cited_figures()]
    assert len(figures) > 12
    for page, figure in figures:
        digits = len(figure.partition(".")[2])
        value = float(figure.replace(",", ""))
        assert any(round(number, digits) == value for number in measured), f"{page}: {figure}"


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_page_shows_what_recommend_prints(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = (ROOT / name).read_text("utf-8")
    command = '$ localllm recommend --device "Strix Halo 128GB"\n'
    shown = page.partition(command)[2].partition("```")[0]
    printed = CliRunner().invoke(app, ["recommend", "--device", "Strix Halo 128GB"]).stdout
    assert len(shown.splitlines()) > 5
    assert printed.startswith(shown)
