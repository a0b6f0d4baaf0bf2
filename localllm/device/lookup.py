"""Find table rows by typed words.

A name matches if it is a full name, a nickname, or a shortened name that still identifies one part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from localllm import json_store, paths
from localllm.device import name_parser, parts_table
from localllm.device.name_parser import FORMS, SUFFIXES, ParsedName
from localllm.device.parts_table import DeviceRow

_NICKNAMES_FILE = Path(__file__).with_name("nicknames.toml")


@cache
def _stored_words() -> dict[str, Any]:
    """The words of names and nicknames. They are kept in the cache folder, because reading 1,300
    names takes longer than a plan."""
    sources = [parts_table.FILE, _NICKNAMES_FILE, Path(__file__), Path(name_parser.__file__)]
    path = paths.cache_dir() / "device-words.json"
    cached: dict[str, Any] = json_store.derived(path, sources, _words)
    return cached


def _words() -> dict[str, Any]:
    """Return what `_stored_words` keeps: the words of names with the places of their rows, and the
    words of nicknames with those of the full names."""
    nicknames = [
        (name_parser.words(nickname), name_parser.read(full_name).words)
        for nickname, full_name in _nickname_table().items()
    ]
    return {"names": _names(), "nicknames": nicknames}


@cache
def _index() -> dict[frozenset[str], tuple[DeviceRow, ...]]:
    """Rows indexed by the set of words that name them, without memory sizes and core counts."""
    rows = parts_table.rows()
    return {
        frozenset(words): tuple(rows[index] for index in indices)
        for words, indices in _stored_words()["names"]
    }


def _names() -> list[tuple[list[str], list[int]]]:
    """Return the words of each name, and the places of the rows that it names."""
    names: dict[frozenset[str], list[int]] = {}
    for index, row in enumerate(parts_table.rows()):
        if row.kind == "system":
            continue
        for alias in _aliases(row):
            words = frozenset(name_parser.read(alias).words)
            if words and index not in names.setdefault(words, []):
                names[words].append(index)
    return [(sorted(words), indices) for words, indices in names.items()]


def _aliases(row: DeviceRow) -> list[str]:
    """Return the names that match a row.

    They are its own name with and without the text in parentheses, and each alternative of "A / B"
    and "A1,A2".
    """
    without_parentheses = re.sub(r"\([^)]*\)", " ", row.name)
    aliases = [without_parentheses, *row.names]
    if not re.search(
        r"[0-9]GB", row.name
    ):  # "(12-core GPU, 24/32GB RAM)" names a size, not the part.
        aliases.append(row.name.replace("(", " ").replace(")", " "))
    if row.bandwidth_gbps:
        aliases += row.cpu
    if row.kind == "unified":  # Code names such as "(Strix Point)" and "(Phoenix/Hawk Point)".
        aliases += re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+(?=[)/])", row.name)
    for part in without_parentheses.split("/"):
        alias = part.strip()
        alternatives = re.fullmatch(r"(.*\s)(\S+),(\w+)", alias)
        if alternatives:
            aliases += [alternatives[1] + alternatives[2], alternatives[1] + alternatives[3]]
        else:
            aliases.append(alias)
    if row.vendor == "Apple" and row.chip:
        aliases.append(row.chip)
    return aliases


# Words that identify no part.
IGNORED_WORDS = {"laptop", *name_parser.DECORATIONS, *map(str, range(10))}
# Vendors of cards that are also words in machines' names.
MAKERS = {"acer", "asus", "dell", "gigabyte", "hp", "lenovo", "msi"}


@cache
def _nickname_table() -> dict[str, str]:
    """The full name of each nickname. Package data, read once per process."""
    import tomllib

    return tomllib.loads(_NICKNAMES_FILE.read_text(encoding="utf-8"))


@cache
def _nicknames() -> dict[frozenset[str], frozenset[str]]:
    return {
        frozenset(nickname_words): frozenset(name_words)
        for nickname_words, name_words in _stored_words()["nicknames"]
    }


@cache
def _known_words() -> frozenset[str]:
    """Every word that occurs in a part's name."""
    return frozenset().union(*_index(), *_nicknames())


def find(part: ParsedName) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    """Return the rows that a part's words name, and the part as it was interpreted.

    A bare number at the end may be a memory size. Words of shops and board vendors are ignored.
    Returns no rows if the words name no part, or several different parts.
    """
    rows, interpreted = _found_rows(part)
    if not rows and part.count > 1:  # "evo x2" is one machine.
        rows, interpreted = _found_rows(replace(part, words=name_parser.words(part.text), count=1))
    if not rows:
        return (), part
    return rows, interpreted


def _found_rows(part: ParsedName) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    known_words = _known_words() - MAKERS
    without_decorations = [
        word
        for word in part.words
        if word in known_words or word not in name_parser.DECORATIONS | MAKERS
    ]
    for candidate in (part, replace(part, words=tuple(without_decorations))):
        rows = _rows_named(candidate.words, candidate.memory_gb)
        if rows:
            return rows, candidate
        without_size = name_parser.without_number(candidate)
        if without_size is None or without_size.memory_gb is None:
            continue
        sold = tuple(
            row
            for row in _rows_named(without_size.words)
            if without_size.memory_gb in row.memory_gb
        )
        if sold:
            return sold, without_size
    if "laptop" in part.words:  # A machine that is sold as a laptop has the same chip.
        without_laptop = replace(part, words=tuple(word for word in part.words if word != "laptop"))
        pools = tuple(
            row
            for row in _rows_named(without_laptop.words, without_laptop.memory_gb)
            if row.kind == "unified"
        )
        return pools, without_laptop
    return (), part


def run_of(part: ParsedName) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    """Return the rows that the longest run of a part's words names.

    The part is returned with the remaining words as its `rest`. Returns no rows if a word next to
    the run could make it another part.
    """
    words = part.words
    spans = sorted(combinations(range(len(words) + 1), 2), key=lambda span: span[0] - span[1])
    for start, end in spans[1:]:
        run = words[start:end]
        rest = words[:start] + words[end:]
        neighbours = {*words[start - 1 : start], *words[end : end + 1]}
        if not name_parser.is_separate(words[:start], words[end:]):
            continue
        is_number_left = any(name_parser.is_number(word) for word in rest)
        if not is_number_left and neighbours & (_known_words() - MAKERS - IGNORED_WORDS):
            continue
        rows, interpreted = _found_rows(replace(part, words=run))
        if rows and not ("laptop" in rest and rows[0].kind == "discrete"):
            return rows, replace(interpreted, rest=rest)
    return (), part


# A number after these words belongs to a card, not to a machine.
_CARD_NUMBER = re.compile(
    r"\b(?:geforce|radeon|tesla|instinct|quadro|titan|arc|[rg]tx|rx)\s+(?=([a-z0-9]+))"
)


def is_machine(part: ParsedName) -> bool:
    """Return True if words that name no part can be a machine's own name.

    Such a name is letters with a number ("p620", "dl380"), or a number after a word that is in no
    part's name ("supermicro 4028gr").
    """
    words = part.words
    if not set(_CARD_NUMBER.findall(part.text)).isdisjoint(words):
        return False
    is_own_name = [re.fullmatch(r"[a-z]+[0-9]+[a-z]*", word) is not None for word in words]
    follows_unknown_word = [word.isalpha() and word not in _known_words() for word in ("0", *words)]
    numbers = [i for i, word in enumerate(words) if name_parser.is_number(word)]
    return any(is_own_name) or (
        bool(numbers) and all(is_own_name[i] or follows_unknown_word[i] for i in numbers)
    )


def row_called(name: str) -> tuple[DeviceRow, str] | None:
    """Return the row whose name was typed exactly, and the text after it.

    A memory size may follow. For a kind of system memory, any text may follow ("DDR5-5600
    dual-channel").
    """
    text = _normalised(name)
    beginnings = []
    for row in parts_table.rows():
        row_text = _normalised(row.name)
        if row_text == text:
            return row, ""
        following = text.removeprefix(f"{row_text} ")
        if following == text:
            continue
        size_match = re.fullmatch(r"([0-9.]+) ?gi?b", following)
        is_sold = size_match is not None and (
            not row.memory_gb or float(size_match[1]) in row.memory_gb
        )
        if row.kind == "system" or is_sold:
            beginnings.append((row, following))
    return max(beginnings, key=lambda found: len(found[0].name), default=None)


def rows_of_driver_name(text: str) -> tuple[DeviceRow, ...]:
    """Return the rows whose driver's name is `text`, with or without a part in parentheses."""
    without_parentheses = re.sub(r"\([^)]*\)", " ", text)
    for name in (
        parts_table.normalised_name(text),
        parts_table.normalised_name(without_parentheses),
    ):
        rows = _printed_names().get(name, ())
        if rows:
            return rows
    return ()


@cache
def _printed_names() -> dict[str, tuple[DeviceRow, ...]]:
    names: dict[str, tuple[DeviceRow, ...]] = {}
    for row in parts_table.rows():
        for name in map(parts_table.normalised_name, row.names):
            names[name] = (*names.get(name, ()), row)
    return names


def slowest_of_series(words: tuple[str, ...]) -> DeviceRow | None:
    """Return the slowest kind of system memory for a processor series ("EPYC 9005", "Xeon")."""
    wanted_words = set(words)
    if not any(len(word) > 3 and word.isalpha() for word in wanted_words):
        return None
    matching = [
        row
        for row in parts_table.rows()
        if row.kind == "system" and wanted_words <= set(_normalised(row.name).split())
    ]
    return min(matching, key=lambda row: row.bandwidth_gbps or 0.0, default=None)


def _normalised(name: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9.]+", " ", name.lower()).split())


def _rows_named(words: Iterable[str], memory_gb: float | None = None) -> tuple[DeviceRow, ...]:
    """Return the rows named by exactly these words, or by the nickname that they are.

    Otherwise, return the rows of the one name that adds only words that do not distinguish parts.
    """
    wanted_words = frozenset(words)
    name_words = _nicknames().get(wanted_words)
    if name_words is not None:
        if memory_gb is not None:
            exact_part = _of_memory(wanted_words, name_words, memory_gb)
            if exact_part:
                return exact_part
        wanted_words = name_words
    exact = _index().get(wanted_words, ())
    if exact:
        # A driver's name can match several rows (3060 Ti GDDR6X). The row with exactly this name is
        # meant.
        return tuple(row for row in exact if _words_of_name(row) == wanted_words) or exact
    return _closest_rows(wanted_words)


def _words_of_name(row: DeviceRow) -> frozenset[str]:
    """Return the words of a row's own name, or of the chip's name for a Mac."""
    name = row.chip if row.vendor == "Apple" else row.name
    return frozenset(name_parser.read(name).words)


def _closest_rows(wanted_words: frozenset[str]) -> tuple[DeviceRow, ...]:
    """Return the rows of the one closest name that adds only words that do not distinguish parts."""
    # "rtx" or "ryzen" names a product line, not a machine. A number such as "64" names nothing.
    if len(wanted_words) < 2 and not any(_is_part_number(word) for word in wanted_words):
        return ()
    distances = {
        key: len(key - wanted_words)
        for key in _index()
        if wanted_words <= key and _is_same_part(key - wanted_words, wanted_words)
    }
    min_distance = min(distances.values(), default=0)
    closest = [key for key, n_extra in distances.items() if n_extra == min_distance]
    if len({_index()[key] for key in closest}) != 1:
        return ()
    return _rows_named(closest[0])


def _is_part_number(word: str) -> bool:
    return any(c.isdigit() for c in word) and (name_parser.is_number(word) or not word.isdecimal())


def _of_memory(
    wanted_words: frozenset[str], name_words: frozenset[str], memory_gb: float
) -> tuple[DeviceRow, ...]:
    """Return the part with exactly these words, if the nickname's part is not sold with this
    memory.

    "A100 40GB" is not the 80 GB card that "A100" usually means. "Jetson Orin Nano 4GB" is not the 8
    GB Super.
    """
    if any(memory_gb in row.memory_gb for row in _index().get(name_words, ())):
        return ()
    # These rows differ only in their form (the board).
    rows_by_form = [
        rows for key, rows in _index().items() if wanted_words < key and key - wanted_words <= FORMS
    ]
    sold = tuple(row for row in chain.from_iterable(rows_by_form) if memory_gb in row.memory_gb)
    return sold or _index().get(wanted_words, ())


# Tier number between a processor's brand and its model number.
_TIERS = {"3", "5", "7", "9"}


def _is_same_part(extra_words: Iterable[str], wanted_words: frozenset[str]) -> bool:
    """Return True if a name with these extra words is the same part.

    The extra words are a brand, a vendor, or words that only one such part has.
    """
    distinguishing = set(extra_words)
    if any(name_parser.is_number(word) for word in wanted_words):
        distinguishing -= _TIERS
    if any(c.isdigit() for c in "".join(distinguishing)):
        return False
    return all(_is_implied(word, wanted_words) for word in distinguishing & SUFFIXES)


def _is_implied(suffix: str, wanted_words: frozenset[str]) -> bool:
    """Return True if the part that these words name exists only with this suffix."""
    if suffix == "blackwell":
        return "pro" in wanted_words
    if suffix == "pro":
        return any(re.fullmatch(r"[a-z]{1,2}[0-9]{2,5}[a-z]?", word) for word in wanted_words)
    return suffix == "max" and bool(wanted_words & {"ai", "halo"})


def longer_names(part: ParsedName) -> list[str]:
    """Return the names of parts whose words include all words of `part` and more."""
    wanted_words = frozenset(part.words)
    rows_by_name = [rows for key, rows in _index().items() if wanted_words and wanted_words < key]
    return list(dict.fromkeys(_short_name(row) for row in chain.from_iterable(rows_by_name)))


@cache
def _names_by_spelling() -> dict[str, str]:
    names = {}
    for row in reversed(parts_table.rows()):
        name = _short_name(row)
        names[" ".join(name_parser.words(name))] = name
    for nickname, full_name in _nickname_table().items():
        rows = _index().get(frozenset(name_parser.words(full_name)), ())
        if rows:
            names[nickname] = _short_name(rows[0])
    return names


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Return up to `count` names of the table that are similar to `name`."""
    wanted_words = [word for word in name_parser.words(name) if word not in MAKERS | {"laptop"}]
    similar = difflib.get_close_matches(
        " ".join(wanted_words), _names_by_spelling(), n=4 * count, cutoff=0.5
    )
    similar = [spelled for spelled in similar if _shares_word(wanted_words, spelled.split())]
    return list(dict.fromkeys(_names_by_spelling()[spelled] for spelled in similar))[:count]


def _shares_word(wanted_words: list[str], other_words: list[str]) -> bool:
    """Return True if a word with a digit, or a long word, is nearly the same in both."""
    distinctive = [word for word in wanted_words if len(word) > 4 or re.search(r"[0-9]", word)]
    return any(
        difflib.get_close_matches(word, other_words, n=1, cutoff=0.5) for word in distinctive
    )


def _short_name(row: DeviceRow) -> str:
    return re.sub(r"\s*\([^)]*\)", "", row.name)
