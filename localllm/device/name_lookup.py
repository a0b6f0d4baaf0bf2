"""Parse machine names as people type them.

Examples: "M4 Max 128GB", "dgx spark", "2x 3090 + 64GB DDR4", "i9-13900k + rtx 4090".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from localllm.device import cpus, lookup, name_parser, parts_table, printed_names
from localllm.device.cpus import USUAL_PROCESSOR
from localllm.device.name_parser import ParsedName
from localllm.device.overrides import check_overrides
from localllm.device.parts_table import DeviceRow
from localllm.device.ram import NO_RAM
from localllm.device.synthetic_device import (
    Computer,
    device_by_figures,
    one_computer,
    simulate,
    with_host,
    without_card,
)
from localllm.device.types import GIB, Device, DeviceNotFoundError, Finding
from localllm.device.unused_words import unused_words
from localllm.errors import UsageError


def resolve(
    name: str, *, memory_gb: float | None = None, bandwidth_gbps: float | None = None
) -> Device:
    """Return a simulated Device for a name as people type it.

    `memory_gb` (GiB as sold) and `bandwidth_gbps` override the table. Parts joined by a plus or a
    comma are cards, their processor, and the computer's memory.

    Raises DeviceNotFoundError with the nearest names for an unknown name, unless both overrides are
    given. Raises UsageError for overrides that are not positive.
    """
    check_overrides(memory_gb, bandwidth_gbps)
    device = _resolved(name, memory_gb, bandwidth_gbps)
    bandwidth = device.bandwidth_gbps
    if bandwidth.basis != "assumed":
        return device
    message = f"its memory bandwidth is assumed: {bandwidth.value:g} GB/s, {bandwidth.source}"
    return replace(
        device, findings=(*device.findings, Finding("warning", message, "--bandwidth GBPS"))
    )


def _resolved(name: str, memory_gb: float | None, bandwidth_gbps: float | None) -> Device:
    try:
        computer = _parsed_computer(name)
    except DeviceNotFoundError:
        if memory_gb is not None and bandwidth_gbps is not None:
            return device_by_figures(name, memory_gb, bandwidth_gbps)
        raise
    if computer.sockets > 1:
        message = f"{computer.sockets} sockets; the plan uses one of them"
        if not computer.parts and bandwidth_gbps is None:
            raise UsageError(
                f"{message}, as each reads its own memory fastest",
                hint="name one processor, or give the bandwidth of all: --bandwidth GBPS",
            )
        computer.findings.append(Finding("warning", message))
    if not computer.parts:
        return without_card(computer, memory_gb, bandwidth_gbps)
    devices = []
    chosen_rows = []
    for rows, full_name_row in computer.parts:
        part = _without_disk(rows, full_name_row, computer)
        own_gb = _own_size(rows, part, computer)
        row, size_gb, findings = _chosen_row(rows, part, own_gb, memory_gb)
        chosen_rows.append(row)
        device = simulate(
            row,
            size_gb,
            findings,
            given_memory=memory_gb is not None,
            bandwidth_gbps=bandwidth_gbps,
            ram=computer.ram if row.kind == "unified" else NO_RAM,
        )
        if part.count > 1 and device.kind != "discrete":
            raise UsageError(
                f"{device.name} is a complete machine, but this command plans for a single one",
                hint=f'for connected machines: localllm recommend --device "{name}" --link 10gbe',
            )
        devices += [device] * part.count
    findings = _unused_word_findings(name, chosen_rows, computer)
    device_with_host = with_host(one_computer(_without_graphics(devices, computer)), computer)
    return replace(
        device_with_host, findings=(*computer.findings, *findings, *device_with_host.findings)
    )


def _unused_word_findings(name: str, rows: list[DeviceRow], computer: Computer) -> list[Finding]:
    """Return a finding on the words that contradict the found parts, unless one exists."""
    reported_text = " ".join(finding.message for finding in computer.findings)
    text = printed_names.typed_form(name)
    typed_text = " ".join(name_parser.read(part).text for part in name_parser.split(text))
    typed_text = re.sub(r"\bl?p?ddr[2-5]x?[\s-]*[0-9]*", " ", typed_text)
    unused = unused_words(typed_text, rows, computer.cpu)
    words = [word for word in unused if not re.search(rf"\b{re.escape(word)}\b", reported_text)]
    if not words:
        return []
    names = " and ".join(dict.fromkeys(row.name for row in rows))
    return [Finding("warning", f"{' '.join(words)!r} does not belong to {names}")]


def _without_graphics(devices: list[Device], computer: Computer) -> list[Device]:
    """Remove a processor's integrated graphics if there are cards, and add a finding.

    The memory that it shares is the computer's.
    """
    discrete_cards = [device for device in devices if device.kind == "discrete"]
    whole_machines = [
        device
        for device in devices
        if device.kind != "discrete" and device.accelerator in ("metal", "cuda")
    ]
    if not discrete_cards:
        return devices
    for device in devices:
        if device in discrete_cards or device in whole_machines:
            continue
        computer.add_ram(device.memory.total_bytes / GIB, None)
        message = f"{device.name} is not used beside a card; its memory is the computer's"
        if all(message != finding.message for finding in computer.findings):
            computer.findings.append(Finding("info", message))
    return [*discrete_cards, *whole_machines]


def _parsed_computer(name: str) -> Computer:
    """Parse a name into table rows, processor and memory.

    Raises DeviceNotFoundError if a part of the name is unknown.
    """
    computer = Computer([])
    row_and_rest = lookup.row_called(name)
    if row_and_rest is not None:
        row, following = row_and_rest
        computer.parts.append(((row,), name_parser.read(following)))
        return computer
    texts = name_parser.split(printed_names.typed_form(name))
    parts = [(text, name_parser.read(text)) for text in texts]
    n_named = sum(1 for _, part in parts if part.words)
    for text, part in parts:
        if part.words:  # An error quotes the only named part as it was typed.
            _add_part(computer, name if n_named == 1 else text, part)
        elif part.sizes_gb or part.ram or part.own_gb:
            _add_size(computer, part, name)
    if not computer.parts and computer.cpu is None and not computer.ram.kind:
        raise _not_found(name, name_parser.read(name))
    return computer


def _add_part(computer: Computer, text: str, part: ParsedName) -> None:
    """Add the parts that the words name, one after the other.

    Raises DeviceNotFoundError if they name no part, or if a number among them is not recognised.
    """
    n_parts = len(computer.parts)
    rows = lookup.rows_of_driver_name(text)
    interpreted = part
    _check_one_machine(text, rows)
    if len(rows) != 1:
        rows, interpreted = lookup.find(part)
    if not rows:
        rows = lookup.rows_of_driver_name(part.text)
    if not rows:
        rows, interpreted = _processor_or_run(computer, text, part)
    if rows:  # "framework desktop 395": words in the row's own name are not left over.
        name_words = name_parser.words(rows[0].name)
        interpreted = replace(
            interpreted, rest=tuple(word for word in interpreted.rest if word not in name_words)
        )
    _add_rest(computer, text, part, rows, interpreted)
    if rows and not _is_repeated(computer, rows):
        computer.parts.append((rows, interpreted))
    size = None
    if len(computer.parts) == n_parts:
        size = _system_size(part, computer)
    computer.add_ram(size, part.ram)


def _check_one_machine(text: str, rows: tuple[DeviceRow, ...]) -> None:
    """Raise DeviceNotFoundError for a driver's name of machines that differ: "Orin (nvgpu)"."""
    machines = {(row.memory_gb, row.bandwidth_gbps) for row in rows if row.kind == "unified"}
    if len(machines) < 2 or not all(sizes for sizes, _ in machines):
        return
    names = ", ".join(row.name for row in rows)
    message = f"{text!r} is what the driver prints for several machines"
    raise DeviceNotFoundError(message, hint=f"choose one of {names}", param="device")


def _add_rest(
    computer: Computer,
    text: str,
    part: ParsedName,
    rows: tuple[DeviceRow, ...],
    interpreted: ParsedName,
) -> None:
    """Add the part named by the remaining words, if a number is among them.

    Otherwise, add a finding with the words that were not recognised.
    """
    if interpreted.rest != part.words and any(
        name_parser.is_number(word) for word in interpreted.rest
    ):
        rest_part = replace(interpreted, words=interpreted.rest, rest=(), count=1)
        if rows and rows[0].kind == "discrete":
            rest_part = replace(rest_part, sizes_gb=(), own_gb=None, ram=None)
        _add_part(computer, text, rest_part)
        return
    unknown_words = [word for word in interpreted.rest if word not in _ANY_COMPUTER | lookup.MAKERS]
    if unknown_words:
        message = f"{' '.join(unknown_words)!r} is not a known name"
        computer.findings.append(Finding("info", message))


def _is_repeated(computer: Computer, rows: tuple[DeviceRow, ...]) -> bool:
    """Return True for graphics named after their processor: "ryzen 7 7840hs, radeon 780m"."""
    if computer.cpu is None or rows[0].kind != "unified":
        return False
    return any(rows == rows_known for rows_known, _ in computer.parts)


def _system_size(part: ParsedName, computer: Computer) -> float | None:
    """Return the stated size of the computer's memory.

    Sizes in terabytes belong to a disk, unless the processor is a server's.
    """
    is_server = computer.cpu is not None and computer.cpu.channels >= _SERVER_CHANNELS
    if part.own_gb:
        return part.own_gb
    return next((size for size in part.sizes_gb if is_server or size < _TERABYTE_GB), None)


_SERVER_CHANNELS = 4
_TERABYTE_GB = 1024


def _processor_or_run(
    computer: Computer, text: str, part: ParsedName
) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    """Find the processor among the words, with its graphics, or the rows named by a run of words.

    Returns the rows and the part with the remaining words. Raises DeviceNotFoundError if the words
    name no part.
    """
    processor_and_rest = cpus.named(part.words)
    if processor_and_rest is not None:
        computer.cpu, rest = processor_and_rest
        computer.sockets = part.count
    elif frozenset(part.words) <= _ANY_COMPUTER and (
        part.sizes_gb or part.ram or not _SYSTEMS.isdisjoint(part.words)
    ):
        computer.cpu = USUAL_PROCESSOR
        computer.sockets = 1
        rest = ()
    else:
        return _run_or_line(text, part)
    graphics = parts_table.by_cpu(computer.cpu.name)
    processor = replace(part, words=(), rest=rest, count=1)
    if graphics is not None and graphics.kind == "unified":
        return (graphics,), processor
    return (), processor


def _run_or_line(text: str, part: ParsedName) -> tuple[tuple[DeviceRow, ...], ParsedName]:
    """Return the rows named by a run of the words, or the memory kind of a processor series.

    Returns no rows for a machine's own name. Raises DeviceNotFoundError for unknown words.
    """
    full_name_row = parts_table.by_cpu(" ".join(part.words))
    if full_name_row is not None:
        name_words = set(name_parser.words(" ".join((full_name_row.name, *full_name_row.cpu))))
        return (full_name_row,), replace(
            part, rest=tuple(word for word in part.words if word not in name_words)
        )
    rows, interpreted = lookup.run_of(part)
    if rows:
        return rows, interpreted
    memory_row = lookup.slowest_of_series(part.words)
    if memory_row is not None:
        return (memory_row,), interpreted
    if not lookup.is_machine(part):
        raise _not_found(text, part)
    return (), replace(part, words=(), rest=part.words)


# Words of the names that `localllm device` prints for a computer without a processor's name.
_SYSTEMS = {"linux", "windows"}
# General words for a computer that identify no part.
_ANY_COMPUTER = {
    "laptop", "desktop", "pc", "computer", "machine", "box", "old", "new", "my", "office", "gaming",
    "home", "cheap", "x86", "aarch64", "arm64", "riscv64", "cpu",
    "only", "windows", "linux", "no", "without", "card", "any",
}  # fmt: skip


def _add_size(computer: Computer, part: ParsedName, name: str) -> None:
    """Add a size that is typed separately. It is the computer's memory, with one exception.

    If only a comma separates it from a card that is sold with this size, it is the card's memory.
    """
    if computer.parts and "+" not in name and part.ram is None:
        rows, card = computer.parts[-1]
        if card.memory_gb is None and any(part.memory_gb in row.memory_gb for row in rows):
            computer.parts[-1] = (rows, replace(card, sizes_gb=part.sizes_gb, own_gb=part.own_gb))
            return
    computer.add_ram(_system_size(part, computer), part.ram)


# Most names that an error suggests.
_MAX_SIMILAR = 6


def _not_found(text: str, part: ParsedName) -> DeviceNotFoundError:
    longer_names = lookup.longer_names(part)
    if len(longer_names) > 1 and any(character.isdigit() for character in "".join(part.words)):
        names = ", ".join(longer_names[:4])
        message = f"{text!r} is not in the table, but {names}"
        hint = f"choose one of {names}, or describe the machine: --memory GB --bandwidth GBPS"
        return DeviceNotFoundError(message, hint=hint, param="device")
    similar = longer_names or lookup.nearest_names(part.text)
    if len(similar) > _MAX_SIMILAR:
        similar = []  # of a general word such as laptop
    closest = ", ".join(similar)
    if re.search(r"\b(?:i?mac|macbook|apple)(?![a-z])", text.lower()):
        hint = (
            'give the chip as "About This Mac" shows it: "M4 16GB", "M3 Pro 36GB"; '
            "for an Intel Mac, give the processor"
        )
    elif closest:
        hint = f"did you mean {closest}? Or describe it: --memory GB --bandwidth GBPS"
    else:
        hint = (
            "name its processor or card as `localllm device` prints it there, or describe it: "
            "--memory GB --bandwidth GBPS"
        )
    message = f"no device called {text!r} is in the table"
    return DeviceNotFoundError(message, hint=hint, param="device")


# Smallest RAM in GB of a computer with a card.
_MIN_RAM_GB = 4
# A card that is resold with more memory has about twice that of the row.
_RESALE_FACTOR = 2


# Sizes of disks in GB, as sold.
_DISK_SIZES_GB = {128, 256, 500, 512, 1000, 1024, 2000, 2048, 4096, 8192}
# Largest memory in GB of configurable machines other than servers.
_MAX_MEMORY_GB = 256.0


def _without_disk(rows: Sequence[DeviceRow], part: ParsedName, computer: Computer) -> ParsedName:
    """Return `part` without the sizes that belong to a disk, and add a finding for each."""
    row = rows[0]
    if row.kind == "system":
        return part
    largest_gb: float = _TERABYTE_GB - 1
    is_fixed = False
    if row.kind == "unified":
        sold_gb = set(chain.from_iterable(row.memory_gb for row in rows))
        largest_gb = max(sold_gb, default=_MAX_MEMORY_GB)
        # A machine that is sold with only one memory size has that size.
        is_fixed = row.vendor.startswith("NVIDIA") and len(sold_gb) == 1
    sizes = []
    for size in part.sizes_gb:
        if size > largest_gb and (is_fixed or size in _DISK_SIZES_GB):
            message = f"{size:g} GB is assumed to be the disk: no {row.name} has so much memory"
            computer.findings.append(Finding("info", message))
        else:
            sizes.append(size)
    return replace(part, sizes_gb=tuple(sizes))


def _own_size(rows: Sequence[DeviceRow], part: ParsedName, computer: Computer) -> float | None:
    """Return the memory size of the part itself.

    Other sizes are the computer's memory, such as sizes with which no such card is sold. For
    several cards, the size may be their total ("4x 3090 96gb").
    """
    if rows[0].kind != "discrete":
        own_gb = part.memory_gb or computer.ram.size_gb
        for size in part.sizes_gb:
            if size != own_gb:
                message = f"{size:g} GB is ignored: {own_gb:g} GB is its memory"
                computer.findings.append(Finding("warning", message))
        return own_gb
    sold_gb = {*chain.from_iterable((*row.memory_gb, *row.resold_gb) for row in rows)}
    own_gb = part.own_gb or _sold_size(sold_gb, part)
    for size in part.sizes_gb:
        if size != own_gb:
            computer.add_ram(size, None)
            message = (
                f"{size:g} GB is assumed to be the computer's memory: no {rows[0].name} has so much"
            )
            computer.findings.append(Finding("info", message, "--memory GB"))
    if own_gb is not None and own_gb not in sold_gb and own_gb / part.count in sold_gb:
        return own_gb / part.count
    return own_gb


def _sold_size(sold_gb: set[float], part: ParsedName) -> float | None:
    """Return the stated size that belongs to a card.

    It is a size the card is sold or resold with, or the total of several cards. Cards that are not
    in the table have any size.
    """
    for size in part.sizes_gb:
        if size in sold_gb:
            return size
    for size in part.sizes_gb:
        if size / part.count in sold_gb:
            return size
    for size in part.sizes_gb:
        if not sold_gb or size < _MIN_RAM_GB:
            return size
    return None


def _chosen_row(
    matching: Sequence[DeviceRow], part: ParsedName, own_gb: float | None, memory_gb: float | None
) -> tuple[DeviceRow, float | None, list[Finding]]:
    """Choose one row and a memory size (GiB) from the rows that match the name.

    Findings list what was not stated and had to be chosen.
    """
    wanted_gb = memory_gb if memory_gb is not None else own_gb
    rows = _rows_of_size(matching, part, wanted_gb)
    row = max(rows, key=_size_and_bandwidth)
    findings = []
    if part.cores is None and len(rows) > 1:
        others = [
            matching_row.name
            for matching_row in matching
            if matching_row.bandwidth_gbps != row.bandwidth_gbps
        ]
        if others:
            message = f"assumed {row.name}; the name also means {', '.join(others)}"
            findings.append(Finding("info", message))
    if part.cores not in (None, row.compute_units, row.cores):
        message = f"no {row.name} with {part.cores} cores is listed; the number is ignored"
        findings.append(Finding("info", message))
    sizes = ", ".join(f"{size:g}" for size in row.memory_gb)
    if wanted_gb is None:
        largest_gb = max(row.memory_gb, default=None)
        if len(row.memory_gb) > 1:
            message = f"assumed {largest_gb:g} GB; it is sold with {sizes} GB"
            findings.append(Finding("info", message, "--memory GB"))
        return row, largest_gb, findings
    if row.memory_gb and wanted_gb not in row.memory_gb and memory_gb is None:
        message = f"{row.name} is listed with {sizes} GB, not {wanted_gb:g}; the typed size is used"
        findings.append(Finding("warning", message))
    return row, wanted_gb, findings


def _size_and_bandwidth(row: DeviceRow) -> tuple[float, float, int]:
    """Sort key for bare names: the larger bin with its largest memory is meant."""
    return max(row.memory_gb, default=0.0), row.bandwidth_gbps or 0.0, row.compute_units


def _rows_of_size(
    matching: Sequence[DeviceRow], part: ParsedName, wanted_gb: float | None
) -> Sequence[DeviceRow]:
    """Return the rows that best match the stated GPU cores and memory.

    Without a stated size, "RTX 3080" is the card with exactly this name, not "RTX 3080 12 GB".
    """
    is_sized = wanted_gb is not None
    sizes = ((2, wanted_gb), (1, (wanted_gb or 0.0) / _RESALE_FACTOR))

    def fit(row: DeviceRow) -> tuple[float, ...]:
        is_plain = name_parser.read(row.name).memory_gb is None
        size_rank = max((rank for rank, gb in sizes if gb in row.memory_gb), default=0)
        return (
            is_sized or not row.rare,
            is_sized or is_plain,
            row.compute_units == part.cores,
            size_rank,
        )

    best = max(map(fit, matching))
    return [row for row in matching if fit(row) == best]


def every_sold_machine() -> list[Device]:
    """Return every machine of the table, once for each memory size it is sold with."""
    devices: list[Device] = []
    for row in parts_table.rows():
        devices += [simulate(row, size, []) for size in sorted(row.memory_gb)]
    return devices
