"""Look up processors by the names that systems print and people type (cpus.toml).

The table has cores, memory channels and widest vectors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from localllm import json_store, paths
from localllm.device.ram import NO_RAM, StatedRam
from localllm.device.types import Figure


class Processor(NamedTuple):
    """One processor.

    - `line`: its product line.
    - `channels`: memory channels of 64 bits per socket.
    - `memory`: memory kinds it takes ("DDR5-4800"), the usual one first.
    - `vector`: the widest vectors it computes with.
    - `brand`: words of which one must precede its number.
    """

    name: str
    line: str
    cores: int
    channels: int
    memory: tuple[str, ...]
    vector: str
    source: str
    brand: tuple[str, ...]

    def bandwidth(self, ram: StatedRam = NO_RAM) -> Figure:
        """Return the peak GB/s of its channels with the stated memory.

        Without a stated memory, the memory of its product line is used.
        """
        return ram.bandwidth(self.memory, self.channels, known=bool(self.line))


# Used for a computer without details, and the memory of old computers.
USUAL_PROCESSOR = Processor("computer", "", 4, 2, ("DDR4-3200",), "AVX2", "assumed", ())
_OLD_MEMORY = ("DDR3-1600",)


# Words between a brand and a number: tiers, and additions of shops.
_BRAND_WORDS = {
    "intel", "amd", "core", "ryzen", "threadripper", "epyc", "xeon", "ultra", "ai", "pro", "hx",
    "gold", "silver", "platinum", "naples", "rome", "milan", "genoa", "turin",
    "e5", "e7", "w", "w3", "w5", "w7", "w9", "i3", "i5", "i7", "i9", "3", "5", "7", "9", "cpu",
    "processor",
}  # fmt: skip
# Letters after the number of an Intel desktop processor that change neither cores nor memory.
_PLAIN_LETTERS = ("K", "KF", "KS", "F", "T", "S", "E", "TE")


_FILE = Path(__file__).with_name("cpus.toml")


class _ProcessorLine(NamedTuple):
    """A product line of processors.

    - `facts`: properties common to all of them.
    - `cores`: the cores of each.
    - `lettered`: other names with an appended letter. They count only in lines that do not list
      such a processor.
    """

    facts: dict[str, Any]
    cores: dict[str, int]
    lettered: dict[str, int]


@cache
def _lines() -> list[_ProcessorLine]:
    lines = []
    for facts in json_store.derived(paths.cache_dir() / "cpus.json", [_FILE], _table_rows):
        cores: dict[str, int] = {}
        for n_cores, numbers in facts["cores"].items():
            cores |= dict.fromkeys(numbers.split(), int(n_cores))
        letters: Sequence[str] = ()
        if facts.get("desktop"):
            letters = _PLAIN_LETTERS
        elif "epyc" in facts["brand"]:
            letters = ("P",)
        lettered: dict[str, int] = {}
        for number, letter in product(cores, letters):
            lettered.setdefault(number.rstrip("K") + letter, cores[number])
        lines.append(_ProcessorLine(facts, cores, lettered))
    return lines


def _table_rows() -> list[dict[str, Any]]:
    import tomllib

    rows: list[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["line"]
    return rows


def _by_number(number: str) -> list[Processor]:
    """Return the processors listed by this number, then those listed without its last letter."""
    exact = [_processor(line, number, line.cores) for line in _lines() if number in line.cores]
    lettered = [
        _processor(line, number, line.lettered)
        for line in _lines()
        if number in line.lettered and number not in line.cores
    ]
    return exact + lettered


def _processor(line: _ProcessorLine, number: str, cores: dict[str, int]) -> Processor:
    facts = line.facts
    name = f"{_family(facts['name'])} {number.replace('-', ' ')}"
    return Processor(
        name,
        facts["name"],
        cores[number],
        facts["channels"],
        tuple(facts["memory"]),
        facts["vector"],
        facts["source"],
        tuple(facts["brand"]),
    )


def _family(line: str) -> str:
    """Return the words before the first word with a digit: "Core Ultra" for "Core Ultra 200S"."""
    return " ".join(re.split(r"\s(?=\S*[0-9])|\sX\b", line)[0].split())


def named(words: Sequence[str]) -> tuple[Processor, tuple[str, ...]] | None:
    """Return the processor that these lower-case words name, and the remaining words.

    Returns None if they name no processor. A number without a brand is enough only if no other part
    has its letters (13900k, 9800x3d). Other numbers are also used for graphics cards.
    """
    for i, word in enumerate(words):
        end = i + 1
        number = word.upper()
        joined_number = _joined_number(number, words[end : end + 1])
        if joined_number and _by_number(joined_number):
            number = joined_number
            end += 1
        start = i
        while start and words[start - 1] in _BRAND_WORDS:
            start -= 1
        brand_words = set(words[start:i])
        by_number = _by_number(number)
        candidates = [processor for processor in by_number if brand_words & set(processor.brand)]
        if not candidates and len(by_number) == 1 and _PROCESSOR_NUMBER.fullmatch(number):
            candidates = by_number
        if candidates:
            # Prefer the line with the closest brand: "ai" in "ryzen ai".
            best = max(candidates, key=lambda processor: len(brand_words & set(processor.brand)))
            return best, (*words[:start], *words[end:])
    return None


# Numbers with letters that only processors have.
_PROCESSOR_NUMBER = re.compile(r"[0-9]{3,5}(?!XT)[A-Z]+[0-9]?[A-Z]?|N[0-9]{2,3}|Z[12]-[A-Z]+")


def _joined_number(part: str, following: Sequence[str]) -> str:
    """Join a number with the next word if they belong together ("E5-2690 v4", "3800 XT").

    Returns "" if they do not.
    """
    if not following or not re.fullmatch(r"v[2-6]|xt|extreme|go", following[0]):
        return ""
    word = following[0].upper()
    if word.startswith(("V", "XT")):
        return part + word
    return f"{part}-{word}"


@cache
def processor_called(name: str) -> Processor | None:
    """Return the processor for a name as a system prints it.

    Examples: "12th Gen Intel(R) Core(TM) i7-12700H", "AMD EPYC 9654 96-Core Processor".
    """
    text = re.sub(r"\((?:tm|r)\)|™|®|@.*", " ", name.lower())
    processor_and_rest = named(re.sub(r"[^a-z0-9]+", " ", text).split())
    if processor_and_rest is None:
        return None
    processor, _ = processor_and_rest
    return processor


def usual_bandwidth(name: str, vectors: str) -> Figure:
    """Return the peak GB/s of the usual memory for the processor that a system prints as `name`.

    For a processor missing from the table, its widest `vectors` indicate its age.
    """
    processor = processor_called(name) or USUAL_PROCESSOR
    if processor is USUAL_PROCESSOR and vectors in ("SSE", "AVX"):
        processor = processor._replace(memory=_OLD_MEMORY)
    return processor.bandwidth()


def channels(name: str) -> int:
    """Return the memory channels of one socket of the processor that a system prints as `name`.

    Returns 0 if the table does not list it.
    """
    processor = processor_called(name)
    if processor is not None:
        return processor.channels
    return 0
