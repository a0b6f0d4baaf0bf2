"""Find the words of a typed name that contradict the parts which were found for it.

Such a word is a brand of another vendor, a number of another part, or "laptop".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from localllm.device import name_parser, parts_table
from localllm.device.cpus import Processor
from localllm.device.parts_table import DeviceRow

_BRANDS = {
    "NVIDIA": "nvidia geforce rtx gtx tesla quadro titan jetson dgx",
    "AMD": "amd radeon ryzen epyc threadripper instinct rx",
    "Intel": "intel arc xeon",
    "Apple": "apple macbook imac",
    "Qualcomm": "qualcomm snapdragon",
}


@cache
def _vendors() -> dict[str, str]:
    """Return the vendor of each brand."""
    vendors: dict[str, str] = {}
    for vendor, brands in _BRANDS.items():
        vendors |= dict.fromkeys(brands.split(), vendor)
    return vendors


def unused_words(name: str, rows: Iterable[DeviceRow], cpu: Processor | None) -> list[str]:
    """Return the brands and numbers in `name` that the found parts do not have.

    `rows` are the parts, `cpu` is the processor. A number counts only if it names a part of the
    table.
    """
    part_rows = list(rows)
    names = [_all_names(row) for row in part_rows]
    if cpu is not None:
        names.append(f"{cpu.name} {cpu.line} {' '.join(cpu.brand)}")
    own_words = _words_of(" ".join(names))
    vendors = {row.vendor.split()[0] for row in part_rows}
    vendors |= {_vendors().get(word, "") for word in own_words}
    typed_words = dict.fromkeys(name_parser.spelled(name))
    unused = [word for word in typed_words if not _is_used(word, own_words, vendors)]
    # A laptop's card is another one than the desktop's.
    if "laptop" in unused and all(row.kind != "discrete" for row in part_rows):
        unused.remove("laptop")
    return unused


def _is_used(word: str, own_words: set[str], vendors: set[str]) -> bool:
    """Return False for a brand of a vendor that is not in `vendors`, and for a part's number (or
    "laptop") that is not among the parts' `own_words` words."""
    vendor = _vendors().get(word)
    if vendor is not None:
        return vendor in vendors
    return word in own_words or (word != "laptop" and word not in _part_numbers())


def _all_names(row: DeviceRow) -> str:
    return " ".join((row.name, *row.names, *row.cpu, row.chip, row.family))


def _words_of(text: str) -> set[str]:
    return {*name_parser.spelled(text), *re.findall(r"[a-z0-9]+", text.lower())}


_SHORT_NUMBER = re.compile(r"[0-9]{1,2}$")


@cache
def _part_numbers() -> frozenset[str]:
    """Return the words with a digit that distinguish parts of the table."""
    words: set[str] = set()
    for row in parts_table.rows():
        if row.kind == "system":
            continue
        words |= _words_of(re.sub(r"[0-9]+\s?GB", " ", _all_names(row)))
    return frozenset(
        word for word in words if re.search(r"[0-9]", word) and not _SHORT_NUMBER.match(word)
    )
