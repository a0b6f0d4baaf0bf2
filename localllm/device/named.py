"""Any machine by name, the way people type it: "M4 Max 128GB", "dgx spark", "2x 3090 + 64GB DDR4", "i9-13900k + rtx 4090"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from localllm.device import cards, cpus, lookup, table, typed, usable
from localllm.device.cpus import Processor
from localllm.device.table import DeviceRow
from localllm.device.typed import NO_RAM, Typed, TypedRam
from localllm.device.types import GIB, Device, DeviceNotFoundError, Figure, Finding, Memory
from localllm.errors import UsageError
from localllm.memory.account import keeping, with_released

# A card shows its software a little less than its nominal size: 31.84 of 32 GiB on an RTX 5090, 79.65 of 80 on an H100.
_VRAM_VISIBLE = 0.995
# GB10: MemTotal 127600748 kB of 128 GiB; Jetson: 15.3 of 16 GiB on an Orin NX
# (https://github.com/Andyyyy64/whichllm/pull/165).
_VISIBLE = {"GB10": 127_600_748 * 1024 / (128 * GIB), "N1X": 0.95, "Jetson": 15.3 / 16}
# Cards that no screen is on.
_NO_SCREENS = ("workstation/datacenter", "Instinct")
# Strix and Gorgon Halo with the kernel's GTT limit raised as advised: 110 GiB of 128.
_HALO_REACH = 110 / 128


@dataclass(slots=True)
class _Computer:
    """What a typed name is of: machines or cards, the processor beside them, and the system memory."""

    parts: list[tuple[tuple[DeviceRow, ...], Typed]]
    cpu: Processor | None = None
    ram: TypedRam = NO_RAM

    def add_ram(self, size_gb: float | None, more: TypedRam | None) -> None:
        """Take note of system memory: of its size, or of its kind alone."""
        known, more = self.ram, more or NO_RAM
        self.ram = TypedRam(
            known.size_gb or more.size_gb or size_gb,
            more.kind or known.kind,
            more.rate or known.rate,
            more.channels or known.channels,
        )


def resolve(name: str, *, memory_gb: float | None = None, bandwidth_gbps: float | None = None) -> Device:
    """A simulated Device for a name as people type it; `memory_gb` (GiB as sold) and `bandwidth_gbps` override.

    Raises DeviceNotFoundError with the nearest names for an unknown one (unless both overrides describe it anyway), and
    UsageError for overrides that are not positive. What a plus or a comma joins are cards, their processor, and the memory of
    the computer they are in.
    """
    _check_overrides(memory_gb, bandwidth_gbps)
    given = memory_gb is not None
    row = lookup.called(name)
    if row is not None:
        own = typed.read(name[len(row.name) :]).memory_gb if row.kind == "system" else typed.read(name).memory_gb
        row, gb, findings = _choose((row,), typed.read(name), own, memory_gb)
        return _simulate(row, gb, findings, given_memory=given, bandwidth_gbps=bandwidth_gbps)
    try:
        computer = _read(name)
    except DeviceNotFoundError:
        if memory_gb is not None and bandwidth_gbps is not None:
            return _described(name, memory_gb, bandwidth_gbps)
        raise
    if not computer.parts:
        return _system(computer, memory_gb, bandwidth_gbps)
    devices = []
    for rows, part in computer.parts:
        own = _own_size(rows, part, computer)
        chosen, gb, findings = _choose(rows, part, own, memory_gb)
        others = [size for size in part.sizes_gb if chosen.kind == "discrete" and size != own]
        for size in others:
            findings.append(Finding("info", f"took {size:g} GB as the computer's memory: no {chosen.name} has so much"))
        one = _simulate(chosen, gb, findings, given_memory=given, bandwidth_gbps=bandwidth_gbps)
        if part.count > 1 and one.kind != "discrete":
            raise UsageError(
                f"{one.name} is a whole machine, and this plans for one of them",
                hint=f'several, connected: localllm recommend -m MODEL --device "{name}"',
            )
        devices += [one] * part.count
    return _with_host(_together(_without_graphics(devices)), computer)


def _without_graphics(devices: list[Device]) -> list[Device]:
    """Without a processor's graphics, where there are cards."""
    cards_ = [device for device in devices if device.kind == "discrete"]
    machines = [device for device in devices if device.kind != "discrete" and device.accelerator in ("metal", "cuda")]
    return [*cards_, *machines] if cards_ else devices


def _read(name: str) -> _Computer:
    """Which rows the parts of a name are; raises DeviceNotFoundError for one that is none."""
    computer = _Computer([])
    for text in typed.split(name):
        part = typed.read(text)
        if part.words:
            _add_part(computer, text, part)
        elif part.sizes_gb or part.ram or part.own_gb:
            _add_size(computer, part, name)
    if not computer.parts and computer.cpu is None and not computer.ram.kind:
        raise _not_found(name, typed.read(name))
    return computer


def _add_part(computer: _Computer, text: str, part: Typed) -> None:
    rows, found = lookup.find(part)
    if not rows:
        rows, found = _add_processor(computer, text, part)
    if rows:
        computer.parts.append((rows, found))
    computer.add_ram(None if rows else part.memory_gb, part.ram)


def _add_processor(computer: _Computer, text: str, part: Typed) -> tuple[tuple[DeviceRow, ...], Typed]:
    """The processor that a part names, and the rows that its other words do. Raises DeviceNotFoundError where it names neither."""
    named = cpus.named(part.words)
    if named is None and frozenset(part.words) <= _ANY_COMPUTER and (part.sizes_gb or part.ram):
        named = (_USUAL_PROCESSOR, ())
    if named is None:
        system = lookup.line(part.words)
        if system is None:
            raise _not_found(text, part)
        return (system,), part
    if part.count > 1 and named[0] is not _USUAL_PROCESSOR:
        raise UsageError(f"{text!r}: a plan is of one socket, whose memory it knows; name it once")
    computer.cpu, part = named[0], replace(part, words=named[1])
    if not _has_number(part.words):
        return (), part
    rows, found = lookup.find(part)
    if not rows:
        raise _not_found(text, part)
    return rows, found


def _has_number(words: Iterable[str]) -> bool:
    """A word with a digit: what names a part."""
    return any(c.isdigit() for c in "".join(words))


# Words for a computer that say nothing of it.
_ANY_COMPUTER = {
    "laptop", "desktop", "pc", "computer", "machine", "box", "old", "new", "my", "office", "gaming", "home", "cheap", "x86", "cpu",
    "only", "windows", "linux", "no", "without", "card", "any",
}  # fmt: skip
_USUAL_PROCESSOR = Processor("computer", "", 4, 2, ("DDR4-3200",), "AVX2", "assumed: four cores, two channels", ())


def _add_size(computer: _Computer, part: Typed, name: str) -> None:
    """A size that stands apart is the computer's memory, unless a comma sets it off and the card is sold with just that."""
    if computer.parts and "+" not in name and part.ram is None:
        rows, card = computer.parts[-1]
        if card.memory_gb is None and any(part.memory_gb in row.memory_gb for row in rows):
            computer.parts[-1] = (rows, replace(card, sizes_gb=part.sizes_gb, own_gb=part.own_gb))
            return
    computer.add_ram(part.memory_gb, part.ram)


def _not_found(text: str, part: Typed) -> DeviceNotFoundError:
    longer = lookup.longer(part)
    if longer and _has_number(part.words):
        names = ", ".join(longer[:4])
        hint = f"say which, if it is one of {names}; else describe it: --memory GB --bandwidth GBPS"
        return DeviceNotFoundError(f"{text!r} is not in the table by itself, but {names}", hint=hint, param="device")
    hint = f"did you mean {', '.join(lookup.nearest(part.text))}? Or describe it: --memory GB --bandwidth GBPS"
    if re.search(r"\b(?:i?mac|macbook)\b", text.lower()):
        hint = 'name its chip, as "About This Mac" does: "M4 16GB", "M3 Pro 36GB"; one with an Intel processor by that'
    return DeviceNotFoundError(f"no device called {text!r} is in the table", hint=hint, param="device")


# What is sold again with twice the memory: 4090 with 48 GB, 2080 Ti with 22.
_MODDED = 2


def _own_size(rows: Sequence[DeviceRow], part: Typed, computer: _Computer) -> float | None:
    """The size that is the part's own; what else was said is the computer's memory, as is of a card what none is sold with."""
    if part.own_gb is not None:
        if part.sizes_gb:
            computer.add_ram(part.sizes_gb[0], None)
        return part.own_gb
    if rows[0].kind != "discrete":
        return part.memory_gb or computer.ram.size_gb
    own = _sold_size(rows, part)
    for size in part.sizes_gb:
        if size != own:
            computer.add_ram(size, None)
    return own


def _sold_size(rows: Sequence[DeviceRow], part: Typed) -> float | None:
    """The size that was said of those which a card is sold with, or is after somebody soldered more memory on it."""
    sold = set(chain.from_iterable(row.memory_gb for row in rows))
    modded = set() if "laptop" in part.words else {_MODDED * size for size in sold}
    fitting = [size for size in part.sizes_gb if size in sold]
    fitting += [size for size in part.sizes_gb if size in modded or not sold]
    return fitting[0] if fitting else None


def _choose(
    found: Sequence[DeviceRow], part: Typed, own_gb: float | None, memory_gb: float | None
) -> tuple[DeviceRow, float | None, list[Finding]]:
    """One row and a memory size (GiB) of those the name fits; what was not said is chosen and stated."""
    findings: list[Finding] = []
    wanted = memory_gb if memory_gb is not None else own_gb
    rows = _of_size(found, part, wanted)
    # What people mean by a bare name: the larger bin with its largest memory.
    row = max(rows, key=lambda r: (max(r.memory_gb, default=0.0), r.bandwidth_gbps or 0.0, r.compute_units))
    if part.cores is None and len(rows) > 1:
        findings += _also_meant(row, found)
    sizes = ", ".join(f"{size:g}" for size in row.memory_gb)
    if wanted is None:
        wanted = max(row.memory_gb, default=None)
        if len(row.memory_gb) > 1:
            findings.append(Finding("info", f"took {wanted:g} GB; it is sold with {sizes} GB", "--memory GB"))
    elif sizes and wanted not in row.memory_gb and memory_gb is None:
        findings.append(Finding("warning", f"{row.name} is listed with {sizes} GB, not {wanted:g}: taken as typed"))
    return row, wanted, findings


def _also_meant(row: DeviceRow, found: Sequence[DeviceRow]) -> list[Finding]:
    others = [r.name for r in found if r is not row and r.bandwidth_gbps != row.bandwidth_gbps]
    return [Finding("info", f"took {row.name}; the same name also means {', '.join(others)}")] if others else []


def _of_size(found: Sequence[DeviceRow], part: Typed, wanted_gb: float | None) -> Sequence[DeviceRow]:
    """Those of the rows that have the GPU cores and the memory which were said, as far as any has."""
    if wanted_gb is None:  # "RTX 3080" is the card called just that, not the later "RTX 3080 12 GB"
        found = [row for row in found if typed.read(row.name).memory_gb is None] or found
    if part.cores is not None:
        found = [row for row in found if row.compute_units == part.cores] or found
    return found if wanted_gb is None else [row for row in found if wanted_gb in row.memory_gb] or found


def _simulate(
    row: DeviceRow,
    gb: float | None,
    findings: list[Finding],
    *,
    given_memory: bool = False,
    bandwidth_gbps: float | None = None,
) -> Device:
    if gb is None:
        gb = 32.0
        findings.append(Finding("warning", "its memory size is not in the table: took 32 GB", "--memory GB"))
    bandwidth = row.bandwidth if bandwidth_gbps is None else Figure(bandwidth_gbps, "given", "--bandwidth")
    if bandwidth is None:
        findings.append(
            Finding("warning", "its memory bandwidth is not published: speed can't be estimated", "--bandwidth GBPS")
        )
    if row.chip.startswith("Apple A19"):
        findings.append(Finding("info", "for planning only: localllm does not run on an iPhone"))
    memory, said = _memory(row, gb)
    title = f"{row.name}" if str(f"{gb:g}") in re.findall(r"[0-9.]+", row.name) else f"{row.name} {gb:g} GB"
    return Device(
        name=title,
        kind=row.kind,
        accelerator=row.accelerator,
        family=row.family,
        memory=replace(memory, basis="given", source="--memory") if given_memory else memory,
        bandwidth_gbps=bandwidth,
        **table.facts(row),
        compute_capability=row.compute_capability,
        simulated=True,
        findings=(*findings, *said),
        cpu=row.cpu[0] if row.cores and row.cpu else "",
        n_cpu_cores=row.cores,
        cpu_vectors=row.vectors,
    )


def _memory(row: DeviceRow, gb: float) -> tuple[Memory, list[Finding]]:
    """The pool an idle machine of this kind offers, and what was assumed about it."""
    installed = int(gb * GIB)
    if row.accelerator == "metal":
        limit = usable.mac_default(installed)
        note = Finding("info", "the GPU's share of RAM is macOS' older default; newer versions give up to 84 %")
        return Memory(installed, limit, limit, "assumed", "2/3 of RAM up to 36 GB, 3/4 above (older macOS)"), [note]
    if row.kind == "discrete":
        visible = int(installed * _VRAM_VISIBLE)
        screens = not row.family.startswith(_NO_SCREENS)
        return usable.described_card(visible, f"{gb:g} GB, of which 99.5 % shows", screens=screens), []
    if "Halo" in row.family:
        limit = int(installed * _HALO_REACH)
        pages = usable.gtt_pages_advised(installed)
        note = Finding(
            "info", "assumes the GTT limit is raised (Linux gives half by default)", f"ttm.pages_limit={pages}"
        )
        return Memory(installed, limit, limit, "assumed", "GTT raised: 110 of 128 GiB", installed - limit), [note]
    headless = row.family in _VISIBLE
    visible = int(installed * _VISIBLE.get(row.family, 1.0))
    memory = usable.described_pool(visible, "what the system shows, less what it keeps", headless=headless)
    return replace(memory, basis="datasheet" if headless else "assumed"), []


def _described(name: str, memory_gb: float, bandwidth_gbps: float) -> Device:
    """A machine that is in no table, described by its two figures: planned as one pool of system memory."""
    memory = usable.described_pool(int(memory_gb * GIB), "--memory, less what the system keeps")
    return Device(
        name=name,
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=replace(memory, basis="given"),
        bandwidth_gbps=Figure(bandwidth_gbps, "given", "--bandwidth"),
        simulated=True,
        n_cpu_cores=_USUAL_PROCESSOR.cores,
        cpu_vectors=_USUAL_PROCESSOR.vector,
        findings=(
            Finding(
                "warning", f"{name!r} is not in the table: planned as a CPU with the figures given, and four cores"
            ),
        ),
    )


def _system(computer: _Computer, memory_gb: float | None, bandwidth_gbps: float | None) -> Device:
    """A computer without a card: its processor and memory."""
    cpu, ram = computer.cpu or _USUAL_PROCESSOR, computer.ram
    findings = []
    gb = memory_gb or ram.size_gb
    if gb is None:
        gb = 32.0
        findings.append(Finding("info", "its memory size was not said: took 32 GB", "--memory GB"))
    size = int(gb * GIB)
    memory = replace(usable.described_pool(size, "what was said, less what the system keeps"), basis="given")
    return Device(
        name=f"{cpu.name} {gb:g} GB",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=memory,
        bandwidth_gbps=_ram_bandwidth(cpu, ram)
        if bandwidth_gbps is None
        else Figure(bandwidth_gbps, "given", "--bandwidth"),
        cpu=cpu.name,
        n_cpu_cores=cpu.cores,
        cpu_vectors=cpu.vector,
        match=cpu.line,
        simulated=True,
        findings=tuple(findings),
    )


def _ram_bandwidth(cpu: Processor | None, ram: TypedRam) -> Figure:
    """GB/s of a processor's channels with the memory that was said, else with what its line was made for."""
    if cpu is None or (cpu is _USUAL_PROCESSOR and ram.kind):
        return ram.bandwidth
    usual = next((m for m in cpu.memory if m.lower().startswith(f"{ram.kind}-")), "") or (
        "" if ram.kind else cpu.memory[0]
    )
    kind, _, rate = usual.lower().rpartition("-")
    known = replace(
        ram, kind=ram.kind or kind, rate=ram.rate or int(rate or 0), channels=ram.channels or cpu.channels
    ).bandwidth
    return replace(known, basis="given" if ram.rate else "derived", source=f"{known.source} ({cpu.line or cpu.source})")


# --- several cards, and the computer around them ---------------------------------------------------------------------


def _together(devices: list[Device]) -> Device:
    """Cards of one or several kinds in one computer. Raises UsageError where one is a machine of its own."""
    kinds = {device.accelerator for device in devices}
    whole = next((device for device in devices if device.kind != "discrete" and len(devices) > 1), None)
    if whole is not None:
        raise UsageError(f"{whole.name} is a whole machine: a plan runs on one of them")
    if len(kinds) > 1:
        raise UsageError(f"cards of {' and '.join(sorted(kinds))} do not share a model: one engine runs on all of them")
    found = list(chain.from_iterable(device.cards or (device,) for device in devices))
    if len(found) == 1:
        return found[0]
    findings = tuple(dict.fromkeys(chain.from_iterable(device.findings for device in devices)))
    # The screens are on one of them: on which is not said, so on the one that a model would take last.
    found[:-1] = [replace(c, memory=with_released(c.memory, c.memory.others_bytes)) for c in found[:-1]]
    return replace(cards.together(cards.numbered(found)), findings=findings)


def _with_host(device: Device, computer: _Computer) -> Device:
    """`device` in its computer."""
    cpu, ram = computer.cpu, computer.ram
    if cpu is not None:
        device = replace(device, cpu=cpu.name, n_cpu_cores=cpu.cores, cpu_vectors=cpu.vector)
    if ram.size_gb is None or device.kind != "discrete":
        return device
    size = int(ram.size_gb * GIB)
    host = replace(usable.described_pool(size, "what was said, less what the system keeps", device.os), basis="given")
    known = device.host_bandwidth_gbps
    figure = known if known and not device.simulated else _ram_bandwidth(cpu, ram)
    return replace(device, host=host, host_bandwidth_gbps=figure)


def with_memory(
    device: Device,
    *,
    ram_gb: float | None = None,
    vram_headroom_gb: float | None = None,
    headroom_gb: float | None = None,
) -> Device:
    """`device` beside so much system memory (GiB as sold), and with so much (GB) of its own, and of the system's, left to
    others, instead of what is assumed. Raises UsageError."""
    if ram_gb is not None:
        if device.kind != "discrete":
            raise UsageError(f"{device.name} has one memory: say its size, such as {device.name.split(' ')[0]} 64GB")
        device = replace(_with_host(device, _Computer([], ram=TypedRam(ram_gb))), simulated=True)
    if vram_headroom_gb is not None:
        device = _keeping_of_cards(device, vram_headroom_gb)
    if headroom_gb is not None:
        if device.kind != "discrete":
            device = replace(device, memory=_with_headroom(device, device.memory, headroom_gb))
        elif device.host is not None:
            device = replace(device, host=_with_headroom(device, device.host, headroom_gb))
    return device


def _with_headroom(device: Device, pool: Memory, headroom_gb: float) -> Memory:
    if headroom_gb * 1e9 >= pool.total_bytes:
        raise UsageError(f"--headroom {headroom_gb:g} leaves nothing of {pool.total_bytes / 1e9:.1f} GB")
    kept = keeping(pool, int(headroom_gb * 1e9), others_bytes=pool.others_bytes)
    if device.accelerator != "metal":
        return kept
    limit = min(pool.limit_bytes, kept.limit_bytes)  # what macOS gives the GPU stays its own affair
    return replace(kept, limit_bytes=limit, available_bytes=min(kept.available_bytes, limit))


def _keeping_of_cards(device: Device, headroom_gb: float) -> Device:
    """Of several cards each keeps its part. What a described card's screens would take is in what is said."""
    keep, whole = int(headroom_gb * 1e9), device.memory
    if keep >= whole.limit_bytes:
        raise UsageError(f"--vram-headroom {headroom_gb:g} leaves nothing of {whole.limit_bytes / 1e9:.1f} GB")

    def kept(memory: Memory) -> Memory:
        part = round(keep * memory.limit_bytes / whole.limit_bytes)
        others = 0 if device.simulated else memory.others_bytes
        left = max(0, memory.limit_bytes - part)
        now = min(left, max(0, memory.total_bytes - part - others))
        return replace(memory, limit_bytes=left, available_bytes=now, system_bytes=part, others_bytes=others)

    each = tuple(replace(card, memory=kept(card.memory)) for card in device.cards)
    return replace(device, memory=kept(whole), cards=each)


def overridden(device: Device, *, memory_gb: float | None = None, bandwidth_gbps: float | None = None) -> Device:
    """`device` planned as if it had this much usable memory (GiB) or this bandwidth; unchanged without either."""
    _check_overrides(memory_gb, bandwidth_gbps)
    if memory_gb is not None:
        size = int(memory_gb * GIB)
        if device.kind == "discrete":
            memory = usable.described_card(size, "--memory", screens=True)
        else:
            memory = usable.described_pool(size, "--memory, less what the system keeps", device.os)
            if device.accelerator == "metal":
                memory = usable.mac(size, None, None, None)
        device = replace(device, memory=replace(memory, basis="given"), simulated=True, cards=())
    if bandwidth_gbps is not None:
        figure = Figure(bandwidth_gbps, "given", "--bandwidth")
        # Another memory is another machine: what this one's processor was timed at says nothing of it.
        device = replace(device, bandwidth_gbps=figure, simulated=True, matrix_rates=())
    return device


def _check_overrides(memory_gb: float | None, bandwidth_gbps: float | None) -> None:
    for option, value in (("--memory", memory_gb), ("--bandwidth", bandwidth_gbps)):
        if value is not None and not 0 < value < 1e6:
            raise UsageError(f"{option} must be a positive number, not {value:g}")


def everything() -> list[Device]:
    """Every machine of the table, once for each memory size it is sold with."""
    devices: list[Device] = []
    for row in table.rows():
        devices += [_simulate(row, size, []) for size in sorted(row.memory_gb)]
    return devices
