"""Any machine by name, the way people type it: "M4 Max 128GB", "dgx spark", "rtx5090", "2x rtx 3090", "rtx 3060 + 64GB RAM"."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache

from localllm.device import cards, table, usable
from localllm.device.table import DeviceRow
from localllm.device.types import Device, DeviceNotFoundError, Figure, Finding, Memory
from localllm.errors import UsageError

GIB = 1 << 30

# A card shows its software a little less than its nominal size: 31.84 of 32 GiB on an RTX 5090, 79.65 of 80 on an H100.
_VRAM_VISIBLE = 0.995
# GB10: MemTotal 127600748 kB of 128 GiB; Jetson: 15.3 of 16 GiB on an Orin NX
# (https://github.com/Andyyyy64/whichllm/pull/165).
_VISIBLE = {"GB10": 127_600_748 * 1024 / (128 * GIB), "N1X": 0.95, "Jetson": 15.3 / 16}
# Strix and Gorgon Halo with the kernel's GTT limit raised as advised: 110 GiB of 128.
_HALO_REACH = 110 / 128

# Nicknames that no row's name contains.
_NICKNAMES = {
    "strix halo": "ryzen ai max+ 395", "framework desktop": "ryzen ai max+ 395",
    "gmktec evo x2": "ryzen ai max+ 395", "evo x2": "ryzen ai max+ 395", "radeon 8060s": "ryzen ai max+ 395",
    "8060s": "ryzen ai max+ 395", "radeon 8050s": "ryzen ai max 390", "gorgon halo": "ryzen ai max+ pro 495",
    "strix point": "ryzen ai 9 hx 370", "krackan point": "ryzen ai 7 350", "lunar lake": "core ultra 200v",
    "panther lake": "core ultra x7", "dgx spark": "dgx spark founders edition",
    "spark": "dgx spark founders edition", "gb10": "dgx spark founders edition",
    "project digits": "dgx spark founders edition", "rtx spark": "rtx spark n1x", "h100": "h100 sxm5",
    "h100 sxm": "h100 sxm5", "h100 pcie": "h100 pcie", "h200": "h200 sxm", "a100": "a100 sxm4",
    "a100 pcie": "a100 pcie", "rtx pro 6000": "rtx pro 6000 blackwell", "rtx 6000 ada": "rtx 6000 ada generation",
    "iphone 17 pro max": "iphone 17 pro", "a19 pro": "iphone 17 pro", "macbook neo": "a18 pro",
    "orin nano": "jetson orin nano super", "jetson nano super": "jetson orin nano super",
    "jetson orin nano": "jetson orin nano super", "jetson thor": "jetson agx thor", "agx thor": "jetson agx thor",
    "thor": "jetson agx thor", "agx orin": "jetson agx orin", "orin nx": "jetson orin nx", "780m": "ryzen 7 7840u",
    "890m": "ryzen ai 9 hx 370",
}  # fmt: skip

# Words that neither name a part nor tell two apart: makers, and what shops and drivers put around a number.
# fmt: off
_IGNORED = {
    "nvidia", "amd", "intel", "apple", "qualcomm", "geforce", "radeon", "gpu", "graphics", "the", "a", "with", "w",
    "edition", "chip", "mac", "macbook", "mini", "imac", "air", "tesla", "unified", "memory", "ram", "vram",
    "developer", "kit", "devkit", "instinct", "mobile", "founders", "generation",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class _Typed:
    """What a typed name says: how many, which words, memory in GB, GPU cores, laptop or not."""

    words: tuple[str, ...]
    memory_gb: float | None
    cores: int | None
    count: int


def resolve(name: str, *, memory_gb: float | None = None, bandwidth_gbps: float | None = None) -> Device:
    """A simulated Device for a name as people type it; `memory_gb` (GiB as sold) and `bandwidth_gbps` override.

    Raises DeviceNotFoundError with the nearest names for an unknown one (unless both overrides describe it anyway), and
    UsageError for overrides that are not positive. What stands behind a plus is another card, or the memory of the
    computer they are in.
    """
    _check_overrides(memory_gb, bandwidth_gbps)
    parts, host = typed_parts(name)
    if len(parts) > 1:
        return _with_host(_together([resolve(part) for part in parts]), host)
    if host is not None and parts:
        one = resolve(parts[0], memory_gb=memory_gb, bandwidth_gbps=bandwidth_gbps)
        if one.kind != "discrete" and memory_gb is None:  # its one memory is what was meant
            return resolve(parts[0], memory_gb=host.size_gb, bandwidth_gbps=bandwidth_gbps)
        return _with_host(one, host)
    typed = _read(parts[0] if parts else name)
    if typed.memory_gb is not None and not 0 < typed.memory_gb < 1e6:
        raise UsageError(f"{name!r} asks for {typed.memory_gb:g} GB of memory")
    found, typed = _find(typed)
    if not found:
        if memory_gb is not None and bandwidth_gbps is not None:
            return _described(name, memory_gb, bandwidth_gbps)
        raise DeviceNotFoundError(f"no device called {name!r} is in the table", hint=_hint(typed), param="device")
    row, gb, findings = _choose(found, typed, memory_gb)
    return _simulate(row, gb, typed.count, findings, given_memory=memory_gb is not None, bandwidth_gbps=bandwidth_gbps)


def _read(name: str) -> _Typed:
    text = name.lower().strip()
    text = re.sub(r"\((?:tm|r|c)\)|™|®|\bup to\b", " ", text)
    count, text = _counted(text)
    memory = None
    sized = re.search(r"\b([0-9]{1,4}(?:\.[0-9]+)?)\s*(gb|gib|g)\b", text)
    if sized:
        memory, text = float(sized.group(1)), text[: sized.start()] + " " + text[sized.end() :]
    cores = None
    cored = re.search(r"\b([0-9]{1,3})[\s-]*(?:cores?|c)\b(?:\s*gpu)?", text)
    if cored:
        cores, text = int(cored.group(1)), text[: cored.start()] + " " + text[cored.end() :]
    return _Typed(_words(text), memory, cores, count)


_COUNTS = {"dual": 2, "two": 2, "double": 2, "triple": 3, "three": 3, "quad": 4, "four": 4}
_BEFORE = re.compile(
    rf"(?:([2-9]|1[0-6])(?:\s*[x×*]\s*(?=[a-z])|\s*×\s*|x\s+|\s+[x*]\s+)|({'|'.join(_COUNTS)})[\s-]+)(?=[a-z0-9])(?!channel)"
)


def _counted(text: str) -> tuple[int, str]:
    """How many of what: "2x rtx 3090", "2x 3090", "dual 3090", "rtx 3090 x2", "3090x2"."""
    before = _BEFORE.match(text)
    if before:
        count = int(before.group(1)) if before.group(1) else _COUNTS[before.group(2)]
        return count, text[before.end() :]
    behind = re.search(r"(?:\s[x×*]\s*|(?<=[0-9]{2})[x×*])([2-9]|1[0-6])\s*$", text)
    if behind:
        return int(behind.group(1)), text[: behind.start()]
    return 1, text


def _words(text: str) -> tuple[str, ...]:
    """Comparable words: "rtx5090" and "RTX-5090" become rtx 5090, "m4max" m4 max, "max+" max."""
    text = re.sub(r"[^a-z0-9.]+", " ", text.lower())
    text = re.sub(r"\b(?:macbook|mac|imac) ?(?:pro|air|studio|mini)\b(?= *\w)|\bdgx (?=[abh][0-9])", " ", text)
    text = re.sub(r"\b(rtx|gtx|rx|arc)([0-9ab])", r"\1 \2", text)
    text = re.sub(r"\b(m[1-9])(pro|max|ultra)\b", r"\1 \2", text)
    text = re.sub(r"\b([0-9]{4})(ti|super|xtx|xt|gre|d)(super)?\b", r"\1 \2 \3", text)
    text = re.sub(r"\b(dgx|jetson|strix|iphone|orin|agx)(spark|orin|halo|point|17|nano|nx|agx|thor)", r"\1 \2", text)
    text = re.sub(r"\b(orin)(nano|nx)", r"\1 \2", text)
    return tuple(word for word in text.split() if word not in _IGNORED)


@cache
def _index() -> dict[frozenset[str], tuple[DeviceRow, ...]]:
    """Rows by the set of words that name them, memory sizes and core counts left out."""
    index: dict[frozenset[str], list[DeviceRow]] = {}
    for row in table.rows():
        for alias in _aliases(row):
            words = frozenset(_read(alias).words)
            if words and row not in index.setdefault(words, []):
                index[words].append(row)
    return {words: tuple(found) for words, found in index.items()}


def _aliases(row: DeviceRow) -> list[str]:
    """The names a row answers to: its own with and without what stands in parentheses, each alternative of "A / B"."""
    bare = re.sub(r"\([^)]*\)", " ", row.name)
    aliases = [row.name.replace("(", " ").replace(")", " "), bare, *bare.split("/"), *row.names]
    if row.vendor == "Apple" and row.chip:
        aliases.append(row.chip)
    return [re.sub(r"\b(up to|core|dual channel)\b", " ", alias) for alias in aliases]


def _find(typed: _Typed) -> tuple[tuple[DeviceRow, ...], _Typed]:
    """Rows the words name, and what was typed once a bare number at its end ("M3 Ultra 512") is read as memory."""
    found = _rows_named(typed.words, typed.memory_gb)
    last = typed.words[-1] if typed.words else ""
    if not found and typed.memory_gb is None and last.isdecimal() and len(last) <= 4:
        shorter = replace(typed, words=typed.words[:-1], memory_gb=float(last))
        found = tuple(row for row in _rows_named(shorter.words) if float(last) in row.memory_gb)
        if found:
            return found, shorter
    return found, typed


def _rows_named(words: tuple[str, ...], memory_gb: float | None = None) -> tuple[DeviceRow, ...]:
    """Rows named by exactly these words, through a nickname if need be; else the one name that contains them all."""
    nickname = next((n for n in _NICKNAMES if _words(n) == words), None)
    wanted = frozenset(words)
    if nickname is not None:
        meant = frozenset(_words(_NICKNAMES[nickname]))
        sizes = {size for row in _index().get(meant, ()) for size in row.memory_gb}
        # "Jetson Orin Nano 4GB" is not the 8 GB Super its short name usually means.
        wanted = meant if memory_gb is None or memory_gb in sizes or wanted not in _index() else wanted
    if not wanted:
        return ()
    exact = _index().get(wanted, ())
    if exact:
        # A driver's name can stand for several rows (3060 Ti GDDR6X): the one really called so is meant.
        return tuple(row for row in exact if _own_words(row) == wanted) or exact
    if sum(len(word) for word in wanted) < 3:
        return ()
    near = sorted((len(key - wanted), sorted(key)) for key in _index() if wanted <= key)
    closest = [key for extra, key in near if extra == near[0][0]]
    # "rtx" or "ryzen" names a shelf, not a machine.
    return _rows_named(tuple(closest[0])) if len(closest) == 1 else ()


def _own_words(row: DeviceRow) -> frozenset[str]:
    return frozenset(_read(row.name if row.vendor != "Apple" else row.chip).words)


def _choose(
    found: tuple[DeviceRow, ...], typed: _Typed, memory_gb: float | None
) -> tuple[DeviceRow, float | None, list[Finding]]:
    """One row and a memory size (GiB) of those the name fits; what was not said is chosen and stated."""
    findings: list[Finding] = []
    wanted = memory_gb if memory_gb is not None else typed.memory_gb
    rows = list(found)
    if wanted is None:  # "RTX 3080" is the card called just that, not the later "RTX 3080 12 GB"
        rows = [row for row in rows if _read(row.name).memory_gb is None] or rows
    if typed.cores is not None:
        rows = [row for row in rows if row.compute_units == typed.cores] or rows
    if wanted is not None:
        rows = [row for row in rows if wanted in row.memory_gb] or rows
    # What people mean by a bare name: the larger bin with its largest memory.
    row = max(rows, key=lambda r: (max(r.memory_gb, default=0.0), r.bandwidth_gbps or 0.0, r.compute_units))
    others = [r.name for r in found if r is not row and r.bandwidth_gbps != row.bandwidth_gbps]
    if others and typed.cores is None and len(rows) > 1:
        findings.append(Finding("info", f"took {row.name}; the same name also means {', '.join(others)}"))
    if wanted is None:
        wanted = max(row.memory_gb, default=None)
        if len(row.memory_gb) > 1:
            sizes = ", ".join(f"{size:g}" for size in row.memory_gb)
            findings.append(Finding("info", f"took {wanted:g} GB; it is sold with {sizes} GB", "--memory GB"))
    elif row.memory_gb and wanted not in row.memory_gb and memory_gb is None:
        sizes = ", ".join(f"{size:g}" for size in row.memory_gb)
        findings.append(Finding("warning", f"{row.name} is listed with {sizes} GB, not {wanted:g}: taken as typed"))
    return row, wanted, findings


def _simulate(
    row: DeviceRow,
    gb: float | None,
    count: int,
    findings: list[Finding],
    *,
    given_memory: bool,
    bandwidth_gbps: float | None,
) -> Device:
    if gb is None:
        gb = 32.0
        findings.append(Finding("warning", "its memory size is not in the table: took 32 GB", "--memory GB"))
    if row.kind != "discrete" and count > 1:
        raise UsageError(f"{row.name} is a whole machine: a plan runs on one of them")
    bandwidth = row.bandwidth if bandwidth_gbps is None else Figure(bandwidth_gbps, "given", "--bandwidth")
    if bandwidth is None:
        findings.append(
            Finding("warning", "its memory bandwidth is not published: speed can't be estimated", "--bandwidth GBPS")
        )
    if row.chip.startswith("Apple A19"):
        findings.append(Finding("info", "for planning only: localllm does not run on an iPhone"))
    memory, said = _memory(row, gb)
    fp16, fp8, fp4 = table.tflops(row)
    title = f"{row.name}" if str(f"{gb:g}") in re.findall(r"[0-9.]+", row.name) else f"{row.name} {gb:g} GB"
    one = Device(
        name=title,
        kind=row.kind,
        accelerator=row.accelerator,
        family=row.family,
        memory=replace(memory, basis="given", source="--memory") if given_memory else memory,
        bandwidth_gbps=bandwidth,
        fp16_tflops=fp16,
        fp8_tflops=fp8,
        fp4_tflops=fp4,
        compute_units=row.compute_units,
        compute_capability=row.compute_capability,
        match=row.name,
        simulated=True,
        findings=(*findings, *said),
    )
    return cards.together(cards.numbered([one] * count))


def _memory(row: DeviceRow, gb: float) -> tuple[Memory, list[Finding]]:
    """The pool an idle machine of this kind offers, and what was assumed about it."""
    installed = int(gb * GIB)
    if row.accelerator == "metal":
        limit = usable.mac_default(installed)
        note = Finding("info", "the GPU's share of RAM is macOS' older default; newer versions give up to 84 %")
        return Memory(installed, limit, limit, "assumed", "2/3 of RAM up to 36 GB, 3/4 above (older macOS)"), [note]
    if row.kind == "discrete":
        visible = int(installed * _VRAM_VISIBLE)
        return Memory(visible, visible, visible, "datasheet", f"{gb:g} GB, of which 99.5 % shows"), []
    if "Halo" in row.family:
        limit = int(installed * _HALO_REACH)
        pages = usable.gtt_pages_advised(installed)
        note = Finding(
            "info", "assumes the GTT limit is raised (Linux gives half by default)", f"ttm.pages_limit={pages}"
        )
        return Memory(installed, limit, limit, "assumed", "GTT raised: 110 of 128 GiB"), [note]
    visible = int(installed * _VISIBLE.get(row.family, 1.0))
    memory = usable.shared_pool(visible, visible, "what the system shows, less 5 %")
    return replace(memory, basis="datasheet" if row.family in _VISIBLE else "assumed"), []


def _described(name: str, memory_gb: float, bandwidth_gbps: float) -> Device:
    """A machine that is in no table, described by its two figures: planned as one pool of system memory."""
    memory = usable.shared_pool(int(memory_gb * GIB), int(memory_gb * GIB), "--memory, less 5 %")
    return Device(
        name=name,
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=replace(memory, basis="given"),
        bandwidth_gbps=Figure(bandwidth_gbps, "given", "--bandwidth"),
        simulated=True,
        findings=(Finding("warning", f"{name!r} is not in the table: planned as a CPU with the figures given"),),
    )


# --- several cards, and the computer around them ---------------------------------------------------------------------

_KIND_OF_RAM = r"(?:(ddr[2-5])(?:[\s-]*([0-9]{4,5}))?|(?:system\s+)?(?:ram|memory))(?:\s+ram)?"
_RAM = re.compile(rf"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:gb|gib|g)?\s*(?:of\s+)?{_KIND_OF_RAM}\s*", re.I)
# A plus between words; or anything that says "and", where a size of memory follows (not the plus of "Max+ 395").
_JOINED = re.compile(
    r"\s+\+\s+|(?:\s*(?:\+|,(?![^(]*\)))|\s(?:and|with|&))\s*(?=[0-9.]+\s*g[bi]*\s*(?:of\s+)?(?:ddr|system|ram|memory))",
    re.I,
)
# Behind a plus a size alone is the computer's memory: no card is called that.
_SIZE_ALONE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:gb|gib|g)\s*", re.I)
# Two channels of the memory most such computers have, where nothing else was said: JEDEC's DDR4-3200 and DDR5-4800.
_USUAL_RATES = {"ddr3": 1600, "ddr4": 3200, "ddr5": 4800}
_USUAL_RAM = "ddr4"
_BYTES_PER_TRANSFER = 16  # two channels of 64 bits


@dataclass(frozen=True, slots=True)
class _Ram:
    """System memory as typed: GiB, and its rate in GB/s with how that is known."""

    size_gb: float
    bandwidth: Figure


def typed_parts(name: str) -> tuple[list[str], _Ram | None]:
    """The machines or cards that a name joins with a plus, and the system memory it states, if any."""
    found, ram = [], None
    for i, part in enumerate(_JOINED.split(name.strip())):
        match, alone = _RAM.fullmatch(part), _SIZE_ALONE.fullmatch(part)
        if i and alone is not None:
            ram = _ram(float(alone.group(1)), "", "")
        elif match is not None:
            ram = _ram(float(match.group(1)), (match.group(2) or "").lower(), match.group(3) or "")
        elif part.strip():
            found.append(part.strip())
    return found, ram


def _ram(size_gb: float, kind: str, rate: str) -> _Ram:
    if not 0 < size_gb < 1e6:
        raise UsageError(f"{size_gb:g} GB of system memory is no size")
    megatransfers = int(rate) if rate else _USUAL_RATES.get(kind or _USUAL_RAM, _USUAL_RATES[_USUAL_RAM])
    source = f"two channels of {(kind or _USUAL_RAM).upper()}-{megatransfers}"
    figure = Figure(megatransfers * _BYTES_PER_TRANSFER / 1000, "given" if rate else "assumed", source)
    return _Ram(size_gb, figure)


def _together(devices: list[Device]) -> Device:
    """Cards of one or several kinds in one computer. Raises UsageError where one is a machine of its own."""
    kinds = {device.accelerator for device in devices}
    whole = next((device for device in devices if device.kind != "discrete"), None)
    if whole is not None:
        raise UsageError(f"{whole.name} is a whole machine: a plan runs on one of them")
    if len(kinds) > 1:
        raise UsageError(f"cards of {' and '.join(sorted(kinds))} do not share a model: one engine runs on all of them")
    found = [card for device in devices for card in device.cards or (device,)]
    findings = tuple(finding for device in devices for finding in device.findings)
    return replace(cards.together(cards.numbered(found)), findings=findings)


def _with_host(device: Device, ram: _Ram | None) -> Device:
    """`device` in a computer with that memory. Raises UsageError where it is its memory already."""
    if ram is None:
        return device
    if device.kind != "discrete":
        raise UsageError(f"{device.name} has one memory: say its size, such as {device.name.split(' ')[0]} 64GB")
    size = int(ram.size_gb * GIB)
    host = replace(usable.shared_pool(size, size, "what was said, less 5 %"), basis="given")
    known = device.host_bandwidth_gbps
    return replace(device, host=host, host_bandwidth_gbps=known if known and not device.simulated else ram.bandwidth)


def with_memory(device: Device, *, ram_gb: float | None = None, vram_headroom_gb: float = 0.0) -> Device:
    """`device` beside so much system memory (GiB as sold), and with so much of its own (GB) left to others. Raises UsageError."""
    if ram_gb is not None:
        device = replace(_with_host(device, _ram(ram_gb, "", "")), simulated=True)
    if vram_headroom_gb > 0:
        keep = int(vram_headroom_gb * 1e9)
        memory = device.memory
        if keep >= memory.limit_bytes:
            raise UsageError(
                f"--vram-headroom {vram_headroom_gb:g} leaves nothing of {memory.limit_bytes / 1e9:.1f} GB"
            )
        # Of several cards each keeps its part.
        share = (memory.limit_bytes - keep) / memory.limit_bytes
        each = tuple(replace(card, memory=_smaller(card.memory, share)) for card in device.cards)
        device = replace(device, memory=_smaller(memory, share), cards=each)
    return device


def _smaller(memory: Memory, share: float) -> Memory:
    limit = round(memory.limit_bytes * share)
    return replace(memory, limit_bytes=limit, available_bytes=min(memory.available_bytes, limit))


def overridden(device: Device, *, memory_gb: float | None = None, bandwidth_gbps: float | None = None) -> Device:
    """`device` planned as if it had this much usable memory (GiB) or this bandwidth; unchanged without either."""
    _check_overrides(memory_gb, bandwidth_gbps)
    if memory_gb is not None:
        size = int(memory_gb * GIB)
        device = replace(device, memory=Memory(size, size, size, "given", "--memory"), simulated=True, cards=())
    if bandwidth_gbps is not None:
        figure = Figure(bandwidth_gbps, "given", "--bandwidth")
        device = replace(device, bandwidth_gbps=figure, simulated=True)
    return device


def _check_overrides(memory_gb: float | None, bandwidth_gbps: float | None) -> None:
    for option, value in (("--memory", memory_gb), ("--bandwidth", bandwidth_gbps)):
        if value is not None and not 0 < value < 1e6:
            raise UsageError(f"{option} must be a positive number, not {value:g}")


def everything() -> list[Device]:
    """Every machine of the table, once for each memory size it is sold with."""
    return [
        _simulate(row, size, 1, [], given_memory=False, bandwidth_gbps=None)
        for row in table.rows()
        for size in sorted(row.memory_gb)
    ]


def nearest(name: str, count: int = 3) -> list[str]:
    return _nearest(_read(name), count)


def _nearest(typed: _Typed, count: int) -> list[str]:
    spelled = {" ".join(_words(re.sub(r"\([^)]*\)", " ", row.name))): _short(row) for row in reversed(table.rows())}
    spelled |= {
        nick: _short(rows[0])
        for nick, target in _NICKNAMES.items()
        if (rows := _index().get(frozenset(_words(target)), ()))
    }
    wanted = " ".join(typed.words)
    words = set(typed.words)
    scored = sorted(
        spelled,
        key=lambda s: len(words & set(s.split())) * 0.3 + difflib.SequenceMatcher(None, wanted, s).ratio(),
        reverse=True,
    )
    return list(dict.fromkeys(spelled[s] for s in scored))[:count]


def _short(row: DeviceRow) -> str:
    return re.sub(r"\s*\([^)]*\)", "", row.name)


def _hint(typed: _Typed) -> str:
    return f"did you mean {', '.join(_nearest(typed, 3))}? Or describe it: --memory GB --bandwidth GBPS"
