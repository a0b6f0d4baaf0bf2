"""The table of known parts (devices.toml), and the search for the row of a reported name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from localllm import json_store, paths
from localllm.device.ram import NO_RAM, StatedRam
from localllm.device.types import GIB, Accelerator, Basis, DeviceKind, Figure

# Words that drivers, shops or people add to a part's name or leave out.
_DECORATION = re.compile(
    r"\((?:tm|r|c)\)|™|®|\bnvidia\b|\bamd\b|\bintel\b|\bgraphics\b|\bgpu\b", re.IGNORECASE
)


class DeviceRow(NamedTuple):
    """One row of devices.toml: a chip bin, a card or a memory configuration.

    - `source`: the page that its figures come from.
    - `memory_gb`: sizes sold, in GiB as the vendor counts.
    - `resold_gb`: sizes with more memory soldered on.
    - `bandwidth_gbps`: decimal GB/s.
    - `memory`: memory kinds if the computer's vendor chooses the memory. The bandwidth is then that
      of two channels.
    - `fp16_tflops`, `fp8_tflops`, `fp4_tflops`: dense TFLOP/s.
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
        """Return the peak memory bandwidth (decimal GB/s) with its source.

        It is the vendor's figure, or that of the stated memory, or that of the usual memory.
        """
        if self.memory and (ram.kind or ram.rate or self.bandwidth_gbps is None):
            return ram.bandwidth(self.memory, 2)
        return Figure(self.bandwidth_gbps or 0.0, self.bandwidth_basis, self.source)


FILE = Path(__file__).with_name("devices.toml")


@cache
def rows() -> tuple[DeviceRow, ...]:
    """Return all rows in file order. Their parsed form is kept in the cache folder, because parsing
    takes 50 ms."""
    entries = json_store.derived(paths.cache_dir() / "devices.json", [FILE], _entries)
    return tuple(map(_row, entries))


def _entries() -> list[dict[str, Any]]:
    import tomllib

    entries: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["device"]
    return entries


def _row(entry: dict[str, Any]) -> DeviceRow:
    fields: dict[str, Any] = {
        key: float(value) if key.endswith(("_gbps", "_tflops")) else value
        for key, value in entry.items()
    }
    for key in ("memory_gb", "resold_gb", "memory", "names", "cpu", "pci"):
        fields[key] = tuple(entry.get(key, ()))
    return DeviceRow(**fields)


def normalised_name(name: str) -> str:
    """Normalise a reported name, so that the spellings of two drivers compare equal.

    Vendor, trademark signs and case are removed.
    """
    return " ".join(_DECORATION.sub(" ", name.lower()).replace("-", " ").split())


def by_gpu_name(
    name: str, memory_bytes: int | None = None, bandwidth_gbps: float | None = None
) -> DeviceRow | None:
    """Return the row of a GPU by its driver's name.

    Among cards with the same name, the one with the nearest memory size (within 10 %) is meant. If
    the sizes are equal too (3060 Ti GDDR6 and GDDR6X), the bandwidth nearest to the reported clocks
    decides.

    The longest match on word boundaries wins. "RTX 5090" is inside "RTX 5090 Laptop GPU", which has
    half the bandwidth.
    """
    reported_name = normalised_name(name)
    # nvidia-smi's table truncates names, so a laptop's GPU looks like a desktop's.
    if reported_name.endswith("..."):
        return None
    matches: list[tuple[str, DeviceRow]] = []
    for row in rows():
        keys = [normalised_name(name) for name in row.names]
        matches += [(key, row) for key in keys if _contains_name(key, reported_name)]
    longest = max((key for key, _ in matches), key=len, default="")
    if not _OTHER_PART_WORDS.isdisjoint(reported_name.replace(longest, " ", 1).split()):
        return None
    longest_matches = [row for key, row in matches if len(key) == len(longest)]
    if bandwidth_gbps is not None:
        longest_matches.sort(key=lambda row: abs((row.bandwidth_gbps or 0.0) - bandwidth_gbps))
    return nearest_memory(longest_matches, memory_bytes)


def is_named(row: DeviceRow, name: str) -> bool:
    """Return True if a reported name contains one of the row's driver names."""
    reported_name = normalised_name(name)
    return any(_contains_name(normalised_name(key), reported_name) for key in row.names)


def _contains_name(name: str, reported_name: str) -> bool:
    """Return True if a name is in a reported name, on word boundaries.

    A desktop GPU's name never matches a laptop GPU.
    """
    if not name or not re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", reported_name):
        return False
    return "laptop" in name.split() or "laptop" not in reported_name.split()


# If one of these words follows a known name, the longer name is another part ("RTX 4070" in "RTX
# 4070 Ti").
_OTHER_PART_WORDS = {
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


def nearest_memory(rows_of_name: Iterable[DeviceRow], memory_bytes: int | None) -> DeviceRow | None:
    """Return the row with the nearest memory size, from rows with the same name.

    Returns None if `memory_bytes` is known and no row is within 10 %.
    """
    candidates = list(rows_of_name)
    if not candidates:
        return None
    sized = [row for row in candidates if row.memory_gb]
    if memory_bytes is None or not sized:
        return candidates[0]

    def relative_error(row: DeviceRow) -> float:
        return min(abs(gb * GIB - memory_bytes) / (gb * GIB) for gb in row.memory_gb)

    nearest = min(sized, key=relative_error)
    if relative_error(nearest) <= 0.10:
        return nearest
    return None


def by_chip(chip: str, gpu_cores: int | None, memory_bytes: int | None = None) -> DeviceRow | None:
    """Return the row of an Apple chip's bin by its brand string and GPU cores.

    Memory decides if several bins have the same cores (M6). If the cores are unknown, the bin sold
    with that much memory is chosen. If several bins are, the one with the lowest bandwidth is
    chosen.
    """
    bins = [row for row in rows() if row.chip == chip]
    exact = [row for row in bins if row.compute_units == gpu_cores]
    if exact:
        return nearest_memory(exact, memory_bytes) or exact[0]
    if gpu_cores is not None:
        # This bin is not listed. All bins of the chip must have the same bandwidth to use a row.
        if len({row.bandwidth_gbps for row in bins}) == 1:
            return bins[0]
        return None
    if memory_bytes is not None:
        bins = [row for row in bins if nearest_memory([row], memory_bytes)] or bins
    return min(bins, key=lambda row: row.bandwidth_gbps or 0.0, default=None)


@cache
def by_cpu(cpu: str) -> DeviceRow | None:
    """Return the row of a processor with integrated graphics, by a part of the CPU's name.

    The comparison ignores case.
    """
    cpu_name = " ".join(cpu.lower().split())
    matches: list[tuple[int, DeviceRow]] = []
    for row in rows():
        matches += [(len(part), row) for part in row.cpu if _is_cpu_part(part, cpu_name)]
    if not matches:
        return None
    _, row = max(matches, key=itemgetter(0))
    return row


def _is_cpu_part(part: str, cpu_name: str) -> bool:
    # Windows omits the dashes: "Snapdragon(R) X2 Elite Extreme - X2E96100 - Qualcomm(R) Oryon(TM)
    # CPU".
    for dash in ("-", "", " "):
        spelling = part.lower().replace("-", dash)
        # Most parts are not in the name at all. The `in` check finds that out faster than a
        # pattern.
        if spelling in cpu_name and re.search(
            rf"(?<![\w]){re.escape(spelling)}(?![\w+])", cpu_name
        ):
            return True
    return False


def by_pci(
    vendor: str, device: str, revision: str = "", memory_bytes: int | None = None
) -> DeviceRow | None:
    """Return the row of a PCI device by its hexadecimal ids.

    A row with a revision matches only that revision.
    """
    with_revision = f"{vendor}:{device}:{revision}".lower()
    without_revision = f"{vendor}:{device}".lower()
    matches = [row for row in rows() if with_revision in row.pci or without_revision in row.pci]
    if len(matches) == 1:
        return matches[0]
    return nearest_memory(matches, memory_bytes)


def bandwidth_of_similar(vendor: str, architecture: str, memory_bytes: int) -> Figure:
    """Return an assumed bandwidth for an unknown card.

    It is the lowest among cards of the nearest memory size from this vendor ("" = any). If the
    architecture is known, only cards of its generation count ("8.6" and "8.9" are the same one).
    """
    cards = [row for row in rows() if row.kind == "discrete" and vendor in (row.vendor, "")]
    generation = architecture[:-1]
    if "." in architecture:
        major, _, _ = architecture.rpartition(".")
        generation = f"{major}."
    if generation:
        own_generation = [row for row in cards if row.compute_capability.startswith(generation)]
        cards = own_generation or cards

    def size_distance(row: DeviceRow) -> float:
        return min(abs(math.log(gb * GIB / memory_bytes)) for gb in row.memory_gb)

    nearest = min(size_distance(row) for row in cards)
    similar_gbps = [
        row.bandwidth().value for row in cards if size_distance(row) <= nearest + _MEMORY_TOLERANCE
    ]
    lowest_gbps = min(similar_gbps)
    source = f"cards of this size have {lowest_gbps:g} to {max(similar_gbps):g} GB/s"
    return Figure(lowest_gbps, "assumed", source)


def slowest(candidates: Iterable[DeviceRow]) -> Figure:
    """Return the lowest bandwidth of these rows, for an unlisted machine of the same kind."""
    row = min(candidates, key=lambda row: row.bandwidth().value)
    return replace(row.bandwidth(), basis="assumed", source=f"the slowest has: {row.name}")


# Tolerance for equal sizes, as a power of e, because a driver may show less memory than there is.
_MEMORY_TOLERANCE = 0.1


def device_fields(row: DeviceRow | None) -> dict[str, Any]:
    """Return the Device fields that come from its row.

    They are dense FP16, FP8 and FP4 TFLOP/s, the compute units, and the row's name.

    A missing FP16 figure is derived from a published one of the same family, in proportion to
    compute units. Chips of one Apple generation and cards of one GeForce generation differ in clock
    by at most about 10 %. GB10's FP16 and FP8 come from its FP4 figure, halved for each doubling of
    the operand. B200's published figures have the same ratio, 9000/4500/2250
    (https://glennklockwood.com/garden/processors/B200).
    """
    if row is None:
        unknown = dict.fromkeys(("fp16_tflops", "fp8_tflops", "fp4_tflops"))
        return {**unknown, "compute_units": 0, "match": ""}
    fp16 = _published_figure(row, row.fp16_tflops)
    fp8 = _published_figure(row, row.fp8_tflops)
    fp4 = _published_figure(row, row.fp4_tflops)
    if row.family in ("GB10", "N1X") and fp4 is not None:
        rule = f"FP4 dense {fp4.value:g} halved per doubling of the operand"
        fp8 = fp8 or Figure(fp4.value / 2, "derived", rule)
        fp16 = fp16 or Figure(fp4.value / 4, "derived", rule)
    return {
        "fp16_tflops": fp16 or _scaled_figure(row),
        "fp8_tflops": fp8,
        "fp4_tflops": fp4,
        "compute_units": row.compute_units,
        "match": row.name,
    }


def _published_figure(row: DeviceRow, tflops: float | None) -> Figure | None:
    if tflops is None:
        return None
    return Figure(tflops, row.compute_basis, row.source)


def _scaled_figure(row: DeviceRow) -> Figure | None:
    """Scale the published FP16 rate of the family's largest part by compute units.

    Returns None if the family's chips do not have the same architecture.
    """
    if not row.compute_units or row.family not in _ONE_ARCHITECTURE:
        return None
    published = [
        other
        for other in rows()
        if other.family == row.family and other.fp16_tflops and other.compute_units
    ]
    sibling = max(published, key=attrgetter("compute_units"), default=None)
    if sibling is None or sibling.fp16_tflops is None:
        return None
    value = sibling.fp16_tflops * row.compute_units / sibling.compute_units
    rate_text = f"{sibling.name}'s {sibling.fp16_tflops:g} TFLOP/s"
    return Figure(round(value, 1), "derived", f"{rate_text} in proportion to compute units")


_ONE_ARCHITECTURE = {
    *(f"Apple M{generation}" for generation in range(1, 6)),
    *(f"GeForce RTX {generation}" for generation in (30, 40, 50)),
}
