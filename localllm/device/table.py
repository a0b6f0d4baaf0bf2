"""The table of known parts (devices.toml) and how a reported name finds its row."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from localllm.device.ram import NO_RAM, StatedRam
from localllm.device.types import GIB, Accelerator, Basis, DeviceKind, Figure

# The words a driver, a shop or a person adds or leaves out around the same part number.
_NOISE = re.compile(
    r"\((?:tm|r|c)\)|™|®|\bnvidia\b|\bamd\b|\bintel\b|\bgraphics\b|\bgpu\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One row of devices.toml: a chip bin, a card or a memory configuration, with the page its
    figures come from.

    `memory_gb` lists the sizes sold, in GiB as the maker counts (`resold_gb`: with more soldered on); bandwidth in decimal GB/s, where it
    is the maker's choice as `memory` on two channels gives it; compute in dense TFLOP/s.
    """

    name: str
    vendor: str
    family: str
    kind: DeviceKind
    accelerator: Accelerator
    source: str
    memory_gb: tuple[float, ...] = ()
    resold_gb: tuple[float, ...] = ()
    memory: tuple[str, ...] = ()
    bandwidth_gbps: float | None = None
    bandwidth_basis: Basis = "datasheet"
    compute_units: int = 0
    compute_basis: Basis = "datasheet"
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    compute_capability: str = ""
    chip: str = ""
    names: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    pci: tuple[str, ...] = ()
    note: str = ""
    cores: int = 0
    vectors: str = ""
    rare: bool = False

    def bandwidth(self, ram: StatedRam = NO_RAM) -> Figure:
        """Peak memory bandwidth (decimal GB/s) with its source: the maker's figure, else of the
        memory that was said, else of what goes there."""
        if self.memory and (ram.kind or ram.rate or self.bandwidth_gbps is None):
            return ram.bandwidth(self.memory, 2)
        return Figure(self.bandwidth_gbps or 0.0, self.bandwidth_basis, self.source)


_HEAD = "[[device]]\n"


@cache
def rows() -> tuple[DeviceRow, ...]:
    return tuple(_row(entry) for entry in tomllib.loads(_text())["device"])


@cache
def _with_cpu() -> tuple[DeviceRow, ...]:
    """The rows that name processors, in file order: a tenth of the table, and of the time to read
    it."""
    wanted = [part for part in _text().split(_HEAD)[1:] if "\ncpu = " in part]
    text = "".join(_HEAD + part for part in wanted)
    return tuple(map(_row, tomllib.loads(text)["device"]))


@cache
def _text() -> str:
    return Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")


def _row(entry: dict[str, Any]) -> DeviceRow:
    fields: dict[str, Any] = {
        key: float(value) if key.endswith(("_gbps", "_tflops")) else value
        for key, value in entry.items()
    }
    for key in ("memory_gb", "resold_gb", "memory", "names", "cpu", "pci"):
        fields[key] = tuple(entry.get(key, ()))
    return DeviceRow(**fields)


def plain(name: str) -> str:
    """A reported name without vendor, trademark signs and case, so that two drivers' spellings
    compare equal."""
    return " ".join(_NOISE.sub(" ", name.lower()).replace("-", " ").split())


def by_gpu_name(
    name: str, memory_bytes: int | None = None, bandwidth_gbps: float | None = None
) -> DeviceRow | None:
    """The row of a GPU as its driver calls it; among cards of one name, the one whose memory is
    nearest (within 10 %) and, where sizes agree too (3060 Ti GDDR6 and GDDR6X), the one whose
    bandwidth is nearest to the reported clocks'.

    Longest match wins, on word ends: "RTX 5090" is inside "RTX 5090 Laptop GPU", whose bandwidth is
    half.
    """
    wanted = plain(name)
    # cut off by nvidia-smi's table: a laptop's GPU or a desktop's, nobody can tell
    if wanted.endswith("..."):
        return None
    found: list[tuple[str, DeviceRow]] = []
    for row in rows():
        keys = [plain(name) for name in row.names]
        found += [(key, row) for key in keys if _is_in(key, wanted)]
    longest = max((key for key, _ in found), key=len, default="")
    if not _OTHER_PART.isdisjoint(wanted.replace(longest, " ", 1).split()):
        return None
    best = [row for key, row in found if len(key) == len(longest)]
    if bandwidth_gbps is not None:
        best.sort(key=lambda row: abs((row.bandwidth_gbps or 0.0) - bandwidth_gbps))
    return nearest_memory(best, memory_bytes)


def _is_in(key: str, wanted: str) -> bool:
    """Whether a name is in a reported one, on word ends; a laptop's part is none of a desktop's."""
    if not key or not re.search(rf"(?<![\w]){re.escape(key)}(?![\w])", wanted):
        return False
    return "laptop" in key.split() or "laptop" not in wanted.split()


# A known name inside a longer one is another part when one of these words follows ("RTX 4070" in
# "RTX 4070 Ti").
_OTHER_PART = {
    "ti",
    "super",
    "xt",
    "xtx",
    "gre",
    "d",
    "v2",
    "max",
    "mig",
    "ada",
    "laptop",
    "mobile",
    "sff",
    "m",
}


def nearest_memory(found: Iterable[DeviceRow], memory_bytes: int | None) -> DeviceRow | None:
    """Of rows sharing a name the one of nearest memory; None if memory is known and none is within
    10 %."""
    candidates = list(found)
    if not candidates:
        return None
    sized = [row for row in candidates if row.memory_gb]
    if memory_bytes is None or not sized:
        return candidates[0]

    def off(row: DeviceRow) -> float:
        return min(abs(gb * GIB - memory_bytes) / (gb * GIB) for gb in row.memory_gb)

    nearest = min(sized, key=off)
    if off(nearest) <= 0.10:
        return nearest
    return None


def by_chip(chip: str, gpu_cores: int | None, memory_bytes: int | None = None) -> DeviceRow | None:
    """The row of an Apple chip's bin: brand string plus GPU cores, then memory where cores don't
    decide (M6).

    With unknown cores, the bin sold with that much memory; if several are, the one with the lowest
    bandwidth.
    """
    found = [row for row in rows() if row.chip == chip]
    exact = [row for row in found if row.compute_units == gpu_cores]
    if exact:
        return nearest_memory(exact, memory_bytes) or exact[0]
    if gpu_cores is not None:
        # An unlisted bin: all bins of one chip below the listed one share its row only if bandwidth
        # is the same.
        if len({row.bandwidth_gbps for row in found}) == 1:
            return found[0]
        return None
    if memory_bytes is not None:
        found = [row for row in found if nearest_memory([row], memory_bytes)] or found
    return min(found, key=lambda row: row.bandwidth_gbps or 0.0, default=None)


@cache
def by_cpu(cpu: str) -> DeviceRow | None:
    """The row of a processor whose graphics share its memory, by a part of the CPU's name (any
    case)."""
    wanted = " ".join(cpu.lower().split())
    found: list[tuple[int, DeviceRow]] = []
    for row in _with_cpu():
        found += [(len(part), row) for part in row.cpu if _cpu_part(part, wanted)]
    if not found:
        return None
    _, row = max(found, key=itemgetter(0))
    return row


def _cpu_part(part: str, wanted: str) -> bool:
    # Windows leaves the dashes out: "Snapdragon(R) X2 Elite Extreme - X2E96100 - Qualcomm(R)
    # Oryon(TM) CPU".
    for dash in ("-", "", " "):
        known = part.lower().replace("-", dash)
        # Most are not in the name at all, which is found out faster than by a pattern.
        if known in wanted and re.search(rf"(?<![\w]){re.escape(known)}(?![\w+])", wanted):
            return True
    return False


def by_pci(
    vendor: str, device: str, revision: str = "", memory_bytes: int | None = None
) -> DeviceRow | None:
    """The row of a PCI device by its hexadecimal ids; a row that names a revision needs that
    revision."""
    full = f"{vendor}:{device}:{revision}".lower()
    short = f"{vendor}:{device}".lower()
    found = [row for row in rows() if full in row.pci or short in row.pci]
    if len(found) == 1:
        return found[0]
    return nearest_memory(found, memory_bytes)


def of_like_cards(vendor: str, architecture: str, memory_bytes: int) -> Figure:
    """The bandwidth of a card that nobody knows: the least of what its maker's cards of the
    nearest size have ("" = nobody knows which), of its generation where that is known ("8.6" is
    one with "8.9")."""
    cards = [row for row in rows() if row.kind == "discrete" and vendor in (row.vendor, "")]
    generation = architecture[:-1]
    if "." in architecture:
        major, _, _ = architecture.rpartition(".")
        generation = f"{major}."
    if generation:
        own = [row for row in cards if row.compute_capability.startswith(generation)]
        cards = own or cards

    def off(row: DeviceRow) -> float:
        return min(abs(math.log(gb * GIB / memory_bytes)) for gb in row.memory_gb)

    nearest = min(off(row) for row in cards)
    found = [row.bandwidth().value for row in cards if off(row) <= nearest + _NEAR]
    least = min(found)
    source = f"cards of such a size have {least:g} to {max(found):g} GB/s"
    return Figure(least, "assumed", source)


def slowest(found: Iterable[DeviceRow]) -> Figure:
    """The least bandwidth of these rows, for a machine that is like them and none of them."""
    row = min(found, key=lambda row: row.bandwidth().value)
    return replace(row.bandwidth(), basis="assumed", source=f"what the slowest has: {row.name}")


# Two sizes are one where a driver shows so much (e to this power) less of one.
_NEAR = 0.1


def facts(row: DeviceRow | None) -> dict[str, Any]:
    """What a Device takes from its row as it stands there: dense FP16, FP8 and FP4 TFLOP/s, compute
    units, and the row's name.

    A missing FP16 figure is derived from the same family's published one, in proportion to compute
    units: chips of one Apple generation and cards of one GeForce generation differ by clock within
    about a tenth. GB10's FP16 and FP8 come from its FP4 figure, halved for each doubling of the
    operand, as B200's published 9000/4500/2250 are
    (https://glennklockwood.com/garden/processors/B200).
    """
    if row is None:
        unknown = dict.fromkeys(("fp16_tflops", "fp8_tflops", "fp4_tflops"))
        return {**unknown, "compute_units": 0, "match": ""}
    fp16 = _listed(row, row.fp16_tflops)
    fp8 = _listed(row, row.fp8_tflops)
    fp4 = _listed(row, row.fp4_tflops)
    if row.family in ("GB10", "N1X") and fp4 is not None:
        rule = f"FP4 dense {fp4.value:g} halved per doubling of the operand"
        fp8 = fp8 or Figure(fp4.value / 2, "derived", rule)
        fp16 = fp16 or Figure(fp4.value / 4, "derived", rule)
    return {
        "fp16_tflops": fp16 or _in_proportion(row),
        "fp8_tflops": fp8,
        "fp4_tflops": fp4,
        "compute_units": row.compute_units,
        "match": row.name,
    }


def _listed(row: DeviceRow, tflops: float | None) -> Figure | None:
    if tflops is None:
        return None
    return Figure(tflops, row.compute_basis, row.source)


def _in_proportion(row: DeviceRow) -> Figure | None:
    """FP16 of the largest of the family that is published, by compute units; None where its chips
    are not of one architecture."""
    if not row.compute_units or row.family not in _ONE_ARCHITECTURE:
        return None
    published = [r for r in rows() if r.family == row.family and r.fp16_tflops and r.compute_units]
    sibling = max(published, key=attrgetter("compute_units"), default=None)
    if sibling is None or sibling.fp16_tflops is None:
        return None
    value = sibling.fp16_tflops * row.compute_units / sibling.compute_units
    known = f"{sibling.name}'s {sibling.fp16_tflops:g} TFLOP/s"
    return Figure(round(value, 1), "derived", f"{known} in proportion to compute units")


_ONE_ARCHITECTURE = {
    *(f"Apple M{generation}" for generation in range(1, 6)),
    *(f"GeForce RTX {generation}" for generation in (30, 40, 50)),
}
