"""Every name that a program prints for a device of the table resolves to this device. A made-up
name never gives another device without a message."""

from __future__ import annotations

import random
import re

import pytest

from localllm.device import cpus, parts_table
from localllm.device.name_lookup import resolve
from localllm.device.types import Device, DeviceNotFoundError
from localllm.errors import UsageError

GIB = 1 << 30
ROWS = parts_table.rows()
# Names that a driver prints for all Orin modules, and for both Thors.
SHARED_BY_MACHINES = {"Orin (nvgpu)", "NVIDIA Thor"}


def driver_names(row: parts_table.DeviceRow) -> set[str]:
    """Return the names that nvidia-smi, Vulkan, CIM and system_profiler print."""
    printed = {row.chip} - {""}
    for name in set(row.names) - SHARED_BY_MACHINES:
        printed.add(name)
        if row.vendor == "AMD":
            printed |= {f"{name} (RADV NAVI31)", name.replace("Radeon", "Radeon(TM)")}
            if row.kind == "unified":
                printed.add(f"AMD {name} Graphics")
        if row.vendor == "Intel":
            printed |= {f"{name} Graphics", f"{name} GPU (16GB)"}
    return printed


def processor_names(row: parts_table.DeviceRow) -> set[str]:
    """Return the names in /proc/cpuinfo and CIM of processors that the table names in full."""
    graphics = re.search(r"Radeon [0-9]+[MS]", " ".join((row.name, *row.names)))
    printed = set()
    for name in row.cpu:
        if row.vendor == "AMD" and "ryzen" in name.lower():
            maker = "" if name.startswith("AMD") else "AMD "
            printed |= {f"{maker}{name}", f"{maker}{name} with Radeon Graphics"}
            if graphics:
                printed |= {
                    f"{maker}{name} w/ {graphics[0]}",
                    f"{maker}{name} w/ {graphics[0]} Graphics",
                }
        if row.vendor == "Intel" and "Ultra" in name:
            printed.add(f"Intel(R) Core(TM) {name.removeprefix('Core(TM) ')}")
        if row.vendor == "Qualcomm":
            joined = name.replace("-", "")
            printed.add(f"Snapdragon(R) X2 Elite - {joined} - Qualcomm(R) Oryon(TM) CPU")
            printed.add(f"Snapdragon(R) X 12-core {joined} @ 3.40 GHz")
    return printed


def same_name(row: parts_table.DeviceRow, name: str) -> list[parts_table.DeviceRow]:
    """Return the rows that share a driver's name or an Apple chip."""
    if row.chip:
        return [other for other in ROWS if other.chip == row.chip]
    return [other for other in ROWS if parts_table.is_named(other, name) and other.kind == row.kind]


@pytest.mark.parametrize("vendor", sorted({row.vendor for row in ROWS}))
def test_a_printed_name_resolves_to_its_device(vendor: str) -> None:
    for row in (row for row in ROWS if row.vendor == vendor):
        for name in driver_names(row):
            match = resolve(name).match
            assert match in [other.name for other in same_name(row, name)], (row.name, name)
        for name in processor_names(row):
            assert resolve(name).match == row.name, name


def test_the_name_that_device_prints_names_the_same_device() -> None:
    for row in ROWS:
        for size in row.memory_gb or (None,):
            device = resolve(row.name, memory_gb=size)
            again = resolve(device.name)
            assert again.match == device.match, device.name
            assert again.memory.total_bytes == device.memory.total_bytes, device.name


@pytest.mark.parametrize(
    ("printed", "name", "cores"),
    [
        ("13th Gen Intel(R) Core(TM) i9-13900K", "Core 13900K", 24),
        ("Intel(R) Xeon(R) CPU E5-2687W v4 @ 3.00GHz", "Xeon E5 2687WV4", 12),
        ("AMD EPYC 9654 96-Core Processor                ", "EPYC 9654", 96),
        ("AMD Ryzen 7 3800XT 8-Core Processor", "Ryzen 3800XT", 8),
        ("AMD Ryzen Threadripper PRO 7995WX 96-Cores", "Threadripper 7995WX", 96),
        ("Intel(R) Xeon(R) Gold 6430", "Xeon 6430", 32),
    ],
)
def test_a_printed_processor_is_the_detected_one(printed: str, name: str, cores: int) -> None:
    detected = cpus.processor_called(printed)
    typed = resolve(printed)
    assert detected is not None
    assert (typed.cpu, typed.n_cpu_cores) == (detected.name, detected.cores)
    assert typed.n_cpu_cores == cores, name


def test_a_driver_name_shared_by_several_machines_asks_for_a_choice() -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve("Orin (nvgpu)")
    assert "Jetson Orin NX 16GB" in caught.value.hint


def test_an_unknown_computer_by_the_name_that_device_prints_has_no_card() -> None:
    for name in ("Linux x86_64", "Linux aarch64", "Windows PC"):
        assert resolve(name).accelerator == "cpu"


def test_an_error_quotes_the_name_as_it_was_typed() -> None:
    for name in ("orange pi 5 plus", "AMD RYZEN AI MAX+ 777 w/ Radeon 9999S"):
        with pytest.raises(DeviceNotFoundError) as caught:
            resolve(name)
        assert repr(name) in str(caught.value)


def test_a_machine_with_a_card_is_named_with_its_memory() -> None:
    device = resolve("strix halo 128gb + rtx 3090")
    assert device.match == "GeForce RTX 3090"
    assert device.host is not None
    assert device.host.total_bytes == 128 * GIB
    assert any("Ryzen AI Max+ 395" in finding.message for finding in device.findings)


# --- made-up names --------------------------------------------------------------------------------

MAKERS = ("nvidia", "amd", "intel", "apple", "qualcomm")
SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
PARTS = [row for row in ROWS if row.kind != "system"]
WORDS = sorted(
    {word for row in PARTS for word in re.sub(r"[(),/]", " ", row.name).split()}
    - {"GB", "and", "with"}
)


def made_up(choice: random.Random) -> tuple[str, int | None]:
    """Return a name of the table with one word changed, or a few random words, and its size in
    GB."""
    words = re.sub(r"\([^)]*\)|[0-9]+ ?GB", "", choice.choice(PARTS).name).split()
    at = choice.randrange(len(words))
    kind = choice.randrange(4)
    if kind == 0:
        words[at] = choice.choice(WORDS)
    elif kind == 1:
        words.insert(at, choice.choice(WORDS))
    elif kind == 2:
        words.insert(0, choice.choice(MAKERS))
    else:
        words = [choice.choice((*WORDS, *MAKERS)) for _ in range(choice.randint(1, 4))]
    size = choice.choice((None, *SIZES))
    if size is not None and "GB" not in " ".join(words):
        return f"{' '.join(words)} {size}GB", size
    return " ".join(words), None


def contradictions(name: str, size: int | None, device: Device) -> list[str]:
    """Return the maker, size and chip in `name` that neither the device nor a message contains."""
    reported = " ".join(finding.message for finding in device.findings).lower()
    matched = [row for row in ROWS if row.name == device.match]
    matched += [row for card in device.cards for row in ROWS if row.name == card.match]
    shown = " ".join((device.name, device.cpu, *(row.vendor for row in matched))).lower()
    shown += " " + " ".join(" ".join((*row.names, *row.cpu)) for row in matched).lower()
    brands = {"amd": "ryzen|radeon|epyc", "intel": "core|xeon|arc|processor n"}
    brands["qualcomm"] = "snapdragon"
    known = f"{shown} {reported}"
    found = [
        maker
        for maker in MAKERS
        if maker in name.split() and not re.search(f"{maker}|{brands.get(maker, maker)}", known)
    ]
    sizes = [device.memory.total_bytes, device.memory.total_bytes / device.n_gpus]
    sizes += [memory.total_bytes for memory in (device.host,) if memory]
    sizes += [card.memory.total_bytes for card in device.cards]
    is_size_kept = size is None or any(abs(has - size * GIB) < 0.07 * size * GIB for has in sizes)
    if not is_size_kept and f"{size} gb" not in reported:
        found.append(f"{size} GB")
    chips = re.findall(r"\b(?:[a-z]+[0-9]{2,}[a-z]*|[0-9]{3,4}[a-z]{0,2})\b(?!gb)", name.lower())
    found += [chip for chip in chips if chip not in known and not chip.endswith("gb")]
    return found


@pytest.mark.parametrize(
    ("seed", "n_names"), [(87, 500), pytest.param(3, 3000, marks=pytest.mark.long)]
)
def test_a_made_up_name_gives_no_other_size_chip_or_maker_without_a_message(
    seed: int, n_names: int
) -> None:
    choice = random.Random(seed)
    for _ in range(n_names):
        name, size = made_up(choice)
        try:
            device = resolve(name)
        except (DeviceNotFoundError, UsageError):
            continue
        assert contradictions(name, size, device) == [], (name, device.name, device.findings)
