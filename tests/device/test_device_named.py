"""Machines by name: the reference list in three spellings each, traps, overrides, and the nearest
suggestions."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from localllm.device import cpus, lookup, parts_table
from localllm.device.lookup import nearest_names
from localllm.device.name_lookup import resolve
from localllm.device.overrides import overridden
from localllm.device.types import DeviceNotFoundError
from localllm.errors import NotFoundError, UsageError

GIB = 1 << 30

REFERENCE = {
    "Jetson Orin Nano Super 8GB": [
        "Jetson Orin Nano Super",
        "orin nano super",
        "jetson orin-nano super 8gb",
    ],
    "DGX Spark Founders Edition (GB10)": [
        "DGX Spark (GB10)",
        "dgx spark",
        "NVIDIA GB10",
        "dgxspark",
    ],
    "Ryzen AI Max+ 395 (Strix Halo)": [
        "Strix Halo 395",
        "strix halo",
        "Ryzen AI Max+ 395",
        "AMD RYZEN AI MAX 395 128GB",
    ],
    "M4 Max (40-core GPU)": [
        "M4 Max",
        "M4 Max 128GB",
        "apple m4max 64",
        "MacBook Pro M4 Max 40-core",
    ],
    "M3 Ultra (80-core GPU)": ["M3 Ultra", "M3 Ultra 512", "mac studio m3ultra 256gb"],
    "iPhone 17 Pro (A19 Pro)": ["iPhone 17 Pro", "iphone17 pro", "iPhone 17 Pro Max", "A19 Pro"],
    "GeForce RTX 5090": ["RTX 5090", "rtx5090", "nvidia geforce rtx 5090 32gb", "5090"],
    "GeForce RTX 4090": ["RTX 4090", "geforce rtx4090", "4090 24GB"],
    "H100 SXM5 80 GB": ["H100", "nvidia h100 80gb", "H100 SXM"],
    "B200": ["B200", "nvidia b200", "DGX B200"],
}


@pytest.mark.parametrize(
    ("row", "typed"), [(row, typed) for row, spellings in REFERENCE.items() for typed in spellings]
)
def test_the_reference_machines_are_found_in_every_spelling(row: str, typed: str) -> None:
    device = resolve(typed)
    assert device.match == row
    assert device.simulated
    assert device.bandwidth_gbps.source


def test_every_row_answers_to_its_own_name() -> None:
    found = {row.name: resolve(row.name).match for row in parts_table.rows()}
    assert {name: match for name, match in found.items() if match != name} == {}


@pytest.mark.parametrize(
    ("typed", "match"),
    [
        ("RTX 4090 Laptop", "GeForce RTX 4090 Laptop"),
        ("RTX 5090 D V2", "GeForce RTX 5090 D V2"),
        ("RTX 3080", "GeForce RTX 3080"),
        ("RTX 3080 12GB", "GeForce RTX 3080 12 GB"),
        ("RTX 3060 8GB", "GeForce RTX 3060 8 GB"),
        ("4070tisuper", "GeForce RTX 4070 Ti SUPER"),
        ("3060ti", "GeForce RTX 3060 Ti"),
        ("RTX A6000", "RTX A6000"),
        ("RTX 6000 Ada", "RTX 6000 Ada Generation"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell"),
        ("H100 PCIe", "H100 PCIe 80 GB"),
        ("7900 XT", "Radeon RX 7900 XT"),
        ("M4 Max 36GB", "M4 Max (32-core GPU)"),
        ("M4 Max 32-core", "M4 Max (32-core GPU)"),
        ("M3 Max 36 GB", "M3 Max (30-core GPU)"),
        ("M6 16GB", "M6 (12-core GPU, 16GB RAM)"),
        ("M6 32GB", "M6 (12-core GPU, 24/32GB RAM)"),
        ("Jetson Orin Nano 4GB", "Jetson Orin Nano 4GB"),
        ("framework desktop", "Ryzen AI Max+ 395 (Strix Halo)"),
    ],
)
def test_names_contained_in_longer_names_are_distinguished(typed: str, match: str) -> None:
    assert resolve(typed).match == match


def test_unspecified_variants_are_chosen_and_reported() -> None:
    device = resolve("M4 Max")
    assert any("32-core" in finding.message for finding in device.findings)
    assert any("48, 64, 128" in finding.message for finding in device.findings)
    assert not any("also means" in finding.message for finding in resolve("M4 Max 128GB").findings)


@pytest.mark.parametrize(
    ("typed", "near"),
    [("rtx 5095", "RTX 5090"), ("M9 Max", "Max"), ("strixhallo", "Ryzen AI Max+ 395")],
)
def test_an_unknown_name_suggests_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve(typed)
    assert isinstance(caught.value, NotFoundError)
    assert near in caught.value.hint
    assert any(near in name for name in nearest_names(typed))


@pytest.mark.parametrize("typed", ["Surface Laptop 7", "Dell XPS 15", "ThinkPad X1"])
def test_the_name_of_a_computer_is_answered_with_a_request_for_its_part(typed: str) -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve(typed)
    assert caught.value.hint.startswith("name its processor or card")


@pytest.mark.parametrize("typed", ["", "   ", "rtx", "ryzen", "radeon", "M4 Ultra", "banana"])
def test_a_product_line_or_an_empty_name_is_not_a_machine(typed: str) -> None:
    with pytest.raises(DeviceNotFoundError):
        resolve(typed)


def test_overrides_win_and_are_marked_given() -> None:
    device = resolve("M4 Max", memory_gb=96, bandwidth_gbps=500)
    assert device.memory.total_bytes == 96 * GIB
    assert device.memory.basis == "given"
    assert (device.bandwidth_gbps.value, device.bandwidth_gbps.basis) == (500, "given")


def test_an_unknown_machine_can_be_described_by_two_figures() -> None:
    device = resolve("my homemade board", memory_gb=48, bandwidth_gbps=200)
    assert device.memory.total_bytes == 48 * GIB
    assert any("not in the table" in finding.message for finding in device.findings)


@pytest.mark.parametrize(
    "options", [{"memory_gb": 0.0}, {"memory_gb": -1.0}, {"bandwidth_gbps": float("nan")}]
)
def test_impossible_overrides_are_usage_errors(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        resolve("M4 Max", **options)
    with pytest.raises(UsageError):
        overridden(resolve("M4 Max"), **options)


def test_several_cards_add_memory_and_keep_one_cards_bandwidth() -> None:
    one, two = resolve("rtx 3090"), resolve("2x rtx 3090")
    assert two.memory.total_bytes == 2 * one.memory.total_bytes
    assert two.bandwidth_gbps == one.bandwidth_gbps
    assert two.n_gpus == 2
    with pytest.raises(UsageError):
        resolve("2x M4 Max")


@pytest.mark.parametrize(
    "typed", ["dual RTX 3090", "RTX 3090 x2", "RTX 3090 ×2", "2 x rtx3090", "rtx 3090 + rtx 3090"]
)
def test_two_cards_can_be_named_in_many_ways(typed: str) -> None:
    device, one = resolve(typed), resolve("rtx 3090")
    assert device.n_gpus == 2
    assert device.memory.total_bytes == 2 * one.memory.total_bytes
    assert device.bandwidth_gbps == one.bandwidth_gbps


@pytest.mark.parametrize(
    ("typed", "gbps", "basis"),
    [
        ("rtx 3060 12GB + 64GB RAM", 51.2, "assumed"),
        ("rtx 3060 12GB+64gb ram", 51.2, "assumed"),
        ("rtx 3060 12GB with 64 GB of RAM", 51.2, "assumed"),
        ("rtx 3060 12GB + 64GB DDR5", 76.8, "assumed"),
        ("RTX 3060 12GB and 64GB DDR5-6000", 96.0, "given"),
    ],
)
def test_a_card_can_be_named_with_the_system_memory(typed: str, gbps: float, basis: str) -> None:
    device = resolve(typed)
    assert device.memory == resolve("rtx 3060 12GB").memory
    assert device.host is not None
    assert device.host.total_bytes == 64 * GIB
    assert device.host_bandwidth_gbps is not None
    assert (device.host_bandwidth_gbps.value, device.host_bandwidth_gbps.basis) == (gbps, basis)


def test_mixed_cards_keep_the_memory_size_of_each() -> None:
    device = resolve("RTX 5090 + RTX 3090 + 96GB DDR5")
    large, small = (resolve(name).memory.limit_bytes for name in ("RTX 5090", "RTX 3090"))
    assert [card.memory.limit_bytes for card in device.cards] == [large, small]
    assert device.memory.limit_bytes == large + small
    assert 936 < device.bandwidth_gbps.value < 1792
    assert resolve("RTX 4090 + 2x RTX 3090").n_gpus == 3


@pytest.mark.parametrize(
    "typed", ["RTX 4090 + M4 Max", "RTX 4090 + RX 7900 XTX", "RTX 4090 + banana"]
)
def test_devices_that_cannot_share_a_model_are_refused(typed: str) -> None:
    with pytest.raises((UsageError, DeviceNotFoundError)):
        resolve(typed)


def test_a_typed_memory_size_sets_the_size_of_a_unified_memory() -> None:
    assert resolve("Ryzen AI Max+ 395 + 64GB RAM").memory.total_bytes == 64 * GIB
    assert resolve("Ryzen AI Max+ 395").memory.total_bytes == 128 * GIB


def test_a_simulated_gb10_has_its_visible_memory_less_five_per_cent() -> None:
    memory = resolve("dgx spark").memory
    assert memory.total_bytes == pytest.approx(127600748 * 1024, rel=1e-6)
    assert memory.limit_bytes == pytest.approx(0.95 * memory.total_bytes, rel=1e-6)


def test_a_phone_is_for_planning_only() -> None:
    assert any("planning only" in finding.message for finding in resolve("iPhone 17 Pro").findings)


def test_an_unpublished_bandwidth_is_that_of_the_usual_memory_type() -> None:
    figure = resolve("780m").bandwidth_gbps
    assert (figure.value, figure.basis) == (89.6, "assumed")
    assert "two channels of DDR5-5600" in figure.source
    assert "120 GB/s if it is LPDDR5X-7500" in figure.source
    assert any(figure.source in finding.message for finding in resolve("780m").findings)


def test_the_two_sizes_of_an_a770_have_different_memory() -> None:
    """17.5 Gbps GDDR6 on the 16 GB card, 16 on the 8 GB one, both 256 bits wide."""
    for size, gbps in ((16, 560), (8, 512)):
        figure = resolve(f"Arc A770 {size}GB").bandwidth_gbps
        assert figure is not None
        assert figure.value == gbps
        row = parts_table.by_pci("8086", "56a0", memory_bytes=size << 30)
        assert row is not None
        assert row.bandwidth_gbps == gbps


@pytest.mark.parametrize(
    "typed",
    ["2x 3090", "2×3090", "dual 3090", "two RTX 3090", "3090x2", "RTX 3090 x2", "rtx 3090 24GB x2"],
)
def test_a_count_of_two_cards_is_understood_in_every_form(typed: str) -> None:
    assert resolve(typed).name == "2 × GeForce RTX 3090 24 GB"


@pytest.mark.parametrize(
    ("typed", "gb"),
    [
        ("rtx 3060 12gb, 64 gb ram", 64),
        ("3090 + 64GB", 64),
        ("RTX 3090 + RTX 3060 12GB + 32GB", 32),
    ],
)
def test_a_size_after_a_card_is_the_system_memory(typed: str, gb: int) -> None:
    host = resolve(typed).host
    assert host is not None
    assert host.total_bytes == gb << 30


# --- names as people type them --------------------------------------------------------------------


def _typed_names() -> list[list[str]]:
    text = Path(__file__).with_name("names.csv").read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()))[1:]


@pytest.mark.parametrize(
    ("typed", "named", "gbps", "gib", "accelerator"),
    _typed_names(),
    ids=[row[0] for row in _typed_names()],
)
def test_names_from_user_reports_are_resolved(
    typed: str, named: str, gbps: str, gib: str, accelerator: str
) -> None:
    if named.startswith(("ERR", "ask")):
        with pytest.raises((DeviceNotFoundError, UsageError)):
            resolve(typed)
        return
    device = resolve(typed)
    assert named in device.name or named in device.match
    assert accelerator in ("", device.accelerator)
    if gbps:
        assert device.bandwidth_gbps.value == pytest.approx(float(gbps), rel=0.02)
    if gib:
        assert device.memory.total_bytes / GIB == pytest.approx(float(gib), rel=0.06)


DISCRETE = [row for row in parts_table.rows() if row.kind == "discrete"]
SUFFIXES = ("Ti", "SUPER", "XT", "XTX", "GRE", "D", "Laptop", "Mobile", "Max-Q", "Ada", "PRO")


def _bare_name(row: parts_table.DeviceRow) -> str:
    return re.sub(r"\s*\d+ GB\b", "", row.name)


@pytest.mark.parametrize("row", DISCRETE, ids=lambda row: row.name)
def test_a_card_is_found_by_its_name_with_any_decoration(row: parts_table.DeviceRow) -> None:
    name, size = _bare_name(row), row.memory_gb[0]
    plain = re.sub(r"^(GeForce|Radeon|Tesla|Instinct) ", "", name)
    spellings = [
        f"{row.vendor} {row.name}",
        row.name.upper(),
        row.name.lower(),
        f"{name} {size:g}GB",
        f"{plain.replace(' ', '-')} {size:g}gb",
        f"{plain} GPU, {size:g} GB",
        f"1x {plain} {size:g}GB",
        f"ASUS TUF {plain} {size:g}GB",
        f"my pc with {plain} {size:g}GB",
        f"{plain} {size:g}GB + 64GB DDR5",
        re.sub(r"(RTX|GTX|RX) (?=[0-9])", r"\1", f"{plain} {size:g}GB"),
    ]
    for typed in spellings:
        device = resolve(typed)
        assert device.bandwidth_gbps == row.bandwidth(), typed
        assert re.sub(r"\s*\d+ GB\b", "", device.match).startswith(name), typed
    for typed in (
        f"2x {plain} {size:g}GB",
        f"2x{plain} {size:g}GB",
        f"dual {plain} {size:g}GB",
        f"{row.name} + {row.name}",
    ):
        assert resolve(typed).n_gpus == 2, typed
    ram = resolve(f"{plain} {size:g}GB, 64gb ram")
    assert ram.host is not None
    assert ram.host.total_bytes == 64 * GIB


@pytest.mark.parametrize("row", DISCRETE, ids=lambda row: row.name)
def test_a_suffix_more_or_less_is_another_part(
    row: parts_table.DeviceRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with one suffix more or less resolves to the part with exactly that name, or to no
    part."""
    # Suggestions for unknown names take the most time and have tests of their own.
    monkeypatch.setattr(lookup, "nearest_names", lambda name: [])
    words = _bare_name(row).split()
    asked = [" ".join(w for w in words if w != gone) for gone in words if gone in SUFFIXES]
    asked += [f"{_bare_name(row)} {more}" for more in SUFFIXES]
    for typed in asked:
        try:
            found = resolve(typed)
        except DeviceNotFoundError:
            continue
        other = next(r for r in DISCRETE if r.name == found.match)
        said = typed.replace("Mobile", "Laptop")
        alike = {
            w.lower()
            for w in (said.replace("Max-Q", "Laptop") if "GeForce RTX" in said else said).split()
        }
        more = {w.lower() for w in SUFFIXES}
        # W7900 and R9700 name one part each, with or without PRO.
        lettered = {"pro"} if re.search(r"\b[RVW][0-9]{3,4}\b", typed) else set()
        assert {
            w.lower() for w in _bare_name(other).split()
        } & more - lettered == alike & more - lettered, (
            typed,
            found.match,
        )


@pytest.mark.parametrize(
    ("typed", "cores", "vectors", "gbps"),
    [
        ("EPYC 7302P 256GB", 16, "AVX2", 204.8),
        ("i5-12600k 32gb", 10, "AVX2", 76.8),
        ("i5-12600 32gb", 6, "AVX2", 76.8),
        ("i9-9900X 64gb", 10, "AVX-512", 93.9),
        ("Ryzen 9 9900X 64gb ddr5-6000", 12, "AVX-512", 96.0),
        ("13700H laptop 16gb", 14, "AVX2", 76.8),
        ("Xeon Gold 6430 512GB", 32, "AMX", 307.2),
        ("AMD Ryzen 7 PRO 5800 32GB", 8, "AVX2", 51.2),
        ("Threadripper PRO 5995WX, 8 channels, 512GB", 64, "AVX2", 204.8),
        ("8GB laptop", 4, "AVX2", 51.2),
    ],
)
def test_a_processor_has_cores_vectors_and_channels(
    typed: str, cores: int, vectors: str, gbps: float
) -> None:
    device = resolve(typed)
    assert (device.kind, device.accelerator) == ("system", "cpu")
    assert (device.n_cpu_cores, device.cpu_vectors) == (cores, vectors)
    assert device.bandwidth_gbps.value == pytest.approx(gbps, rel=0.01)


def test_a_processor_named_with_cards_provides_the_host_cores_and_memory() -> None:
    device = resolve("i9-13900k + rtx 4090 + 64gb ddr5")
    assert (device.n_cpu_cores, device.n_gpus, device.match) == (24, 1, "GeForce RTX 4090")
    assert device.host is not None
    assert device.host.total_bytes == 64 * GIB
    assert device.host_bandwidth_gbps is not None
    assert device.host_bandwidth_gbps.value == pytest.approx(89.6)


@pytest.mark.parametrize(
    ("printed", "line", "cores"),
    [
        ("12th Gen Intel(R) Core(TM) i7-12700H", "Core 12th/13th gen mobile", 14),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "Xeon E5 v4", 14),
        ("AMD EPYC 9654 96-Core Processor", "EPYC 9004", 96),
        ("AMD Ryzen AI 9 365 w/ Radeon 880M", "Ryzen AI 300", 10),
    ],
)
def test_a_processor_is_known_by_the_name_its_system_prints(
    printed: str, line: str, cores: int
) -> None:
    found = cpus.processor_called(printed)
    assert found is not None
    assert (found.line, found.cores) == (line, cores)


@pytest.mark.parametrize(
    "name",
    ["AMD Radeon RX 7900 XTX", "NVIDIA GeForce RTX 4090", "QEMU Virtual CPU version 2.5+", ""],
)
def test_a_card_number_is_not_resolved_as_a_processor(name: str) -> None:
    assert cpus.processor_called(name) is None
