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
def _kept() -> dict[str, Any]:
    """The words of names and nicknames. They are kept in the cache folder, because reading 1,300
    names takes longer than a plan."""
    sources = [parts_table.FILE, _NICKNAMES_FILE, Path(__file__), Path(name_parser.__file__)]
    path = paths.cache_dir() / "device-words.json"
    cached: dict[str, Any] = json_store.derived(path, sources, _words)
    return cached


def _words() -> dict[str, Any]:
    """Return what `_kept` keeps: the words of names with the places of their rows, and the words of
    nicknames with those of the full names."""
    nicknames = [
        (name_parser.words(nick), name_parser.read(meant).words)
        for nick, meant in _listed_nicknames().items()
    ]
    return {"names": _names(), "nicknames": nicknames}


@cache
def _index() -> dict[frozenset[str], tuple[DeviceRow, ...]]:
    """Rows indexed by the set of words that name them, without memory sizes and core counts."""
    rows = parts_table.rows()
    return {
        frozenset(words): tuple(rows[at] for at in places) for words, places in _kept()["names"]
    }


def _names() -> list[tuple[list[str], list[int]]]:
    """Return the words of each name, and the places of the rows that it names."""
    names: dict[frozenset[str], list[int]] = {}
    for at, row in enumerate(parts_table.rows()):
        if row.kind == "system":
            continue
        for alias in _aliases(row):
            words = frozenset(name_parser.read(alias).words)
            if words and at not in names.setdefault(words, []):
                names[words].append(at)
    return [(sorted(words), places) for words, places in names.items()]


def _aliases(row: DeviceRow) -> list[str]:
    """Return the names that match a row.

    They are its own name with and without the text in parentheses, and each alternative of "A / B"
    and "A1,A2".
    """
    bare = re.sub(r"\([^)]*\)", " ", row.name)
    aliases = [bare, *row.names]
    if not re.search(
        r"[0-9]GB", row.name
    ):  # "(12-core GPU, 24/32GB RAM)" names a size, not the part.
        aliases.append(row.name.replace("(", " ").replace(")", " "))
    if row.bandwidth_gbps:
        aliases += row.cpu
    if row.kind == "unified":  # Code names such as "(Strix Point)" and "(Phoenix/Hawk Point)".
        aliases += re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+(?=[)/])", row.name)
    for part in bare.split("/"):
        alias = part.strip()
        either = re.fullmatch(r"(.*\s)(\S+),(\w+)", alias)
        if either:
            aliases += [either[1] + either[2], either[1] + either[3]]
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
def _listed_nicknames() -> dict[str, str]:
    """The full name of each nickname. Package data, read once per process."""
    import tomllib

    return tomllib.loads(_NICKNAMES_FILE.read_text(encoding="utf-8"))


@cache
def _nicknames() -> dict[frozenset[str], frozenset[str]]:
    return {frozenset(nick): frozenset(meant) for nick, meant in _kept()["nicknames"]}


@cache
def _known() -> frozenset[str]:
    """Every word that occurs in a part's name."""
    return frozenset().union(*_index(), *_nicknames())


def find(part: ParsedName) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    """Return the rows that a part's words name, and the part as it was interpreted.

    A bare number at the end may be a memory size. Words of shops and board vendors are ignored.
    Returns no rows if the words name no part, or several different parts.
    """
    rows, found = _found(part)
    if not rows and part.count > 1:  # "evo x2" is one machine.
        rows, found = _found(replace(part, words=name_parser.words(part.text), count=1))
    if not rows:
        return (), part
    return rows, found


def _found(part: ParsedName) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    known = _known() - MAKERS
    plain = [
        word for word in part.words if word in known or word not in name_parser.DECORATIONS | MAKERS
    ]
    for tried in (part, replace(part, words=tuple(plain))):
        found = _named(tried.words, tried.memory_gb)
        if found:
            return found, tried
        shorter = name_parser.without_number(tried)
        if shorter is None or shorter.memory_gb is None:
            continue
        sold = tuple(row for row in _named(shorter.words) if shorter.memory_gb in row.memory_gb)
        if sold:
            return sold, shorter
    if "laptop" in part.words:  # A machine that is sold as a laptop has the same chip.
        bare = replace(part, words=tuple(word for word in part.words if word != "laptop"))
        pools = tuple(row for row in _named(bare.words, bare.memory_gb) if row.kind == "unified")
        return pools, bare
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
        if not is_number_left and neighbours & (_known() - MAKERS - IGNORED_WORDS):
            continue
        rows, found = _found(replace(part, words=run))
        if rows and not ("laptop" in rest and rows[0].kind == "discrete"):
            return rows, replace(found, rest=rest)
    return (), part


# A number after these words belongs to a card, not to a machine.
_CARDS = re.compile(
    r"\b(?:geforce|radeon|tesla|instinct|quadro|titan|arc|[rg]tx|rx)\s+(?=([a-z0-9]+))"
)


def is_machine(part: ParsedName) -> bool:
    """Return True if words that name no part can be a machine's own name.

    Such a name is letters with a number ("p620", "dl380"), or a number after a word that is in no
    part's name ("supermicro 4028gr").
    """
    words = part.words
    if not set(_CARDS.findall(part.text)).isdisjoint(words):
        return False
    own = [re.fullmatch(r"[a-z]+[0-9]+[a-z]*", word) is not None for word in words]
    before = [word.isalpha() and word not in _known() for word in ("0", *words)]
    numbers = [i for i, word in enumerate(words) if name_parser.is_number(word)]
    return any(own) or (bool(numbers) and all(own[i] or before[i] for i in numbers))


def called(name: str) -> tuple[DeviceRow, str] | None:
    """Return the row whose name was typed exactly, and the text after it.

    A memory size may follow. For a kind of system memory, any text may follow ("DDR5-5600
    dual-channel").
    """
    text = _spelled(name)
    begun = []
    for row in parts_table.rows():
        spelled = _spelled(row.name)
        if spelled == text:
            return row, ""
        following = text.removeprefix(f"{spelled} ")
        if following == text:
            continue
        size = re.fullmatch(r"([0-9.]+) ?gi?b", following)
        is_sold = size is not None and (not row.memory_gb or float(size[1]) in row.memory_gb)
        if row.kind == "system" or is_sold:
            begun.append((row, following))
    return max(begun, key=lambda found: len(found[0].name), default=None)


def printed(text: str) -> tuple[DeviceRow, ...]:
    """Return the rows whose driver's name is `text`, with or without a part in parentheses."""
    bare = re.sub(r"\([^)]*\)", " ", text)
    for name in (parts_table.plain(text), parts_table.plain(bare)):
        rows = _printed_names().get(name, ())
        if rows:
            return rows
    return ()


@cache
def _printed_names() -> dict[str, tuple[DeviceRow, ...]]:
    names: dict[str, tuple[DeviceRow, ...]] = {}
    for row in parts_table.rows():
        for name in map(parts_table.plain, row.names):
            names[name] = (*names.get(name, ()), row)
    return names


def line(words: tuple[str, ...]) -> DeviceRow | None:
    """Return the slowest kind of system memory for a processor series ("EPYC 9005", "Xeon")."""
    wanted = set(words)
    if not any(len(word) > 3 and word.isalpha() for word in wanted):
        return None
    found = [
        row
        for row in parts_table.rows()
        if row.kind == "system" and wanted <= set(_spelled(row.name).split())
    ]
    return min(found, key=lambda row: row.bandwidth_gbps or 0.0, default=None)


def _spelled(name: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9.]+", " ", name.lower()).split())


def _named(words: Iterable[str], memory_gb: float | None = None) -> tuple[DeviceRow, ...]:
    """Return the rows named by exactly these words, or by the nickname that they are.

    Otherwise, return the rows of the one name that adds only words that do not distinguish parts.
    """
    wanted = frozenset(words)
    meant = _nicknames().get(wanted)
    if meant is not None:
        if memory_gb is not None:
            itself = _of_memory(wanted, meant, memory_gb)
            if itself:
                return itself
        wanted = meant
    exact = _index().get(wanted, ())
    if exact:
        # A driver's name can match several rows (3060 Ti GDDR6X). The row with exactly this name is
        # meant.
        return tuple(row for row in exact if _own_words(row) == wanted) or exact
    return _closest_rows(wanted)


def _own_words(row: DeviceRow) -> frozenset[str]:
    """Return the words of a row's own name, or of the chip's name for a Mac."""
    name = row.chip if row.vendor == "Apple" else row.name
    return frozenset(name_parser.read(name).words)


def _closest_rows(wanted: frozenset[str]) -> tuple[DeviceRow, ...]:
    """Return the rows of the one closest name that adds only words that do not distinguish parts."""
    # "rtx" or "ryzen" names a product line, not a machine. A number such as "64" names nothing.
    if len(wanted) < 2 and not any(_is_part_number(word) for word in wanted):
        return ()
    distances = {
        key: len(key - wanted)
        for key in _index()
        if wanted <= key and _is_same_part(key - wanted, wanted)
    }
    min_distance = min(distances.values(), default=0)
    closest = [key for key, extra in distances.items() if extra == min_distance]
    if len({_index()[key] for key in closest}) != 1:
        return ()
    return _named(closest[0])


def _is_part_number(word: str) -> bool:
    return any(c.isdigit() for c in word) and (name_parser.is_number(word) or not word.isdecimal())


def _of_memory(
    wanted: frozenset[str], meant: frozenset[str], memory_gb: float
) -> tuple[DeviceRow, ...]:
    """Return the part with exactly these words, if the nickname's part is not sold with this
    memory.

    "A100 40GB" is not the 80 GB card that "A100" usually means. "Jetson Orin Nano 4GB" is not the 8
    GB Super.
    """
    if any(memory_gb in row.memory_gb for row in _index().get(meant, ())):
        return ()
    # These rows differ only in their form (the board).
    forms = [rows for key, rows in _index().items() if wanted < key and key - wanted <= FORMS]
    sold = tuple(row for row in chain.from_iterable(forms) if memory_gb in row.memory_gb)
    return sold or _index().get(wanted, ())


# Tier number between a processor's brand and its model number.
_TIERS = {"3", "5", "7", "9"}


def _is_same_part(extra: Iterable[str], wanted: frozenset[str]) -> bool:
    """Return True if a name with these extra words is the same part.

    The extra words are a brand, a vendor, or words that only one such part has.
    """
    words = set(extra)
    if any(name_parser.is_number(word) for word in wanted):
        words -= _TIERS
    if any(c.isdigit() for c in "".join(words)):
        return False
    return all(_is_implied(word, wanted) for word in words & SUFFIXES)


def _is_implied(suffix: str, wanted: frozenset[str]) -> bool:
    """Return True if the part that these words name exists only with this suffix."""
    if suffix == "blackwell":
        return "pro" in wanted
    if suffix == "pro":
        return any(re.fullmatch(r"[a-z]{1,2}[0-9]{2,5}[a-z]?", word) for word in wanted)
    return suffix == "max" and bool(wanted & {"ai", "halo"})


def longer(part: ParsedName) -> list[str]:
    """Return the names of parts whose words include all words of `part` and more."""
    wanted = frozenset(part.words)
    found = [rows for key, rows in _index().items() if wanted and wanted < key]
    return list(dict.fromkeys(_short(row) for row in chain.from_iterable(found)))


@cache
def _spellings() -> dict[str, str]:
    spelled = {}
    for row in reversed(parts_table.rows()):
        name = _short(row)
        spelled[" ".join(name_parser.words(name))] = name
    for nick, meant in _listed_nicknames().items():
        rows = _index().get(frozenset(name_parser.words(meant)), ())
        if rows:
            spelled[nick] = _short(rows[0])
    return spelled


def nearest(name: str, count: int = 3) -> list[str]:
    """Return up to `count` names of the table that are similar to `name`."""
    wanted = [word for word in name_parser.words(name) if word not in MAKERS | {"laptop"}]
    close = difflib.get_close_matches(" ".join(wanted), _spellings(), n=4 * count, cutoff=0.5)
    close = [spelled for spelled in close if _shares_word(wanted, spelled.split())]
    return list(dict.fromkeys(_spellings()[spelled] for spelled in close))[:count]


def _shares_word(wanted: list[str], known: list[str]) -> bool:
    """Return True if a word with a digit, or a long word, is nearly the same in both."""
    telling = [word for word in wanted if len(word) > 4 or re.search(r"[0-9]", word)]
    return any(difflib.get_close_matches(word, known, n=1, cutoff=0.5) for word in telling)


def _short(row: DeviceRow) -> str:
    return re.sub(r"\s*\([^)]*\)", "", row.name)
