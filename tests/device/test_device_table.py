"""devices.toml is complete and consistent. A reported name finds the right row or no row."""

from __future__ import annotations

import json

import pytest

from device import recordings
from localllm.device import parts_table

GIB = 1 << 30


def test_every_row_has_a_source_and_sane_figures() -> None:
    assert len(parts_table.rows()) == 312
    for row in parts_table.rows():
        assert row.source.startswith(("https://", "computed: ", "not published: ")), row.name
        assert row.kind in ("unified", "discrete", "system")
        assert row.bandwidth_gbps is None or 15 < row.bandwidth_gbps < 10_000, row.name
        assert all(1 <= size <= 1024 for size in row.memory_gb), row.name
        precisions = [
            value
            for value in (row.fp16_tflops, row.fp8_tflops, row.fp4_tflops)
            if value is not None
        ]
        assert precisions == sorted(precisions), row.name


def test_names_are_unique_and_the_table_covers_the_required_parts() -> None:
    names = [row.name for row in parts_table.rows()]
    assert len(set(names)) == len(names)
    chips = {row.chip for row in parts_table.rows()}
    for generation in range(1, 6):
        for tier in ("", " Pro", " Max"):
            assert f"Apple M{generation}{tier}" in chips
    assert {
        "Apple M1 Ultra",
        "Apple M2 Ultra",
        "Apple M3 Ultra",
        "Apple M5 Ultra",
        "Apple M6",
        "Apple A18 Pro",
    } <= chips
    assert "Apple M4 Ultra" not in chips  # it does not exist


@pytest.mark.parametrize(
    ("reported", "memory_gib", "row"),
    [
        ("NVIDIA GeForce RTX 5090", 31.84, "GeForce RTX 5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 23.89, "GeForce RTX 5090 Laptop"),
        ("NVIDIA GeForce RTX 5090 D V2", 23.9, "GeForce RTX 5090 D V2"),
        ("GeForce RTX 2080 Ti", 10.76, "GeForce RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3060", 11.76, "GeForce RTX 3060 12 GB"),
        ("NVIDIA GeForce RTX 3060", 7.99, "GeForce RTX 3060 8 GB"),
        ("NVIDIA GeForce RTX 3080", 9.77, "GeForce RTX 3080"),
        ("NVIDIA GeForce RTX 3080", 11.9, "GeForce RTX 3080 12 GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "GeForce RTX 4060 Ti 16 GB"),
        ("NVIDIA A100-SXM4-80GB", 80.0, "A100 SXM4 80 GB"),
        ("NVIDIA H100 80GB HBM3", 79.65, "H100 SXM5 80 GB"),
        ("NVIDIA H200", 140.4, "H200 SXM 141 GB"),
        ("NVIDIA L4", 22.49, "L4"),
        ("NVIDIA L40S", 44.99, "L40S"),
        ("NVIDIA B200", 179.06, "B200"),
        ("Tesla T4", 15.0, "Tesla T4"),
        ("NVIDIA RTX A6000", 47.99, "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.99, "RTX 6000 Ada Generation"),
        ("Intel(R) Arc(TM) B580 Graphics", 12.0, "Arc B580"),
        ("AMD Radeon RX 7900 XT", 19.98, "Radeon RX 7900 XT"),
    ],
)
def test_a_reported_name_finds_its_row(reported: str, memory_gib: float, row: str) -> None:
    found = parts_table.by_gpu_name(reported, int(memory_gib * GIB))
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA GeForce GTX 960", "NVIDIA RTX 5880 Ada Generation", "NVIDIA RTX A500",
        "NVIDIA GeForce RTX 2080 with Max-Q Design", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA "
                                                                                          "GeForce "
                                                                                          "RTX "
                                                                                          "3070 "
                                                                                          "...",
        "Microsoft Basic Render Driver", "",
    ],
)  # fmt: skip
def test_a_part_the_table_lacks_is_not_mistaken_for_another(reported: str) -> None:
    assert parts_table.by_gpu_name(reported) is None


def test_a_known_name_with_another_memory_size_is_another_part() -> None:
    assert parts_table.by_gpu_name("NVIDIA GeForce RTX 4090", 48 * GIB) is None


def test_two_cards_of_one_name_and_size_are_distinguished_by_their_clocks() -> None:
    slow = parts_table.by_gpu_name("NVIDIA GeForce RTX 3060 Ti", 8 * GIB, 448.0)
    fast = parts_table.by_gpu_name("NVIDIA GeForce RTX 3060 Ti", 8 * GIB, 608.0)
    assert slow is not None
    assert fast is not None
    assert (slow.bandwidth_gbps, fast.bandwidth_gbps) == (448, 608.3)


@pytest.mark.parametrize(
    ("chip", "cores", "memory_gib", "bandwidth"),
    [
        ("Apple M3 Max", 30, 36, 300),
        ("Apple M3 Max", 40, 48, 400),
        ("Apple M4 Max", 32, 36, 410),
        ("Apple M4 Max", 40, 128, 546),
        ("Apple M5 Max", 32, 36, 460),
        ("Apple M5 Max", 40, 128, 614),
        ("Apple M3 Ultra", 60, 96, 819),
        ("Apple M6", 12, 16, 153),
        ("Apple M6", 12, 32, 170),
        ("Apple M4 Max", None, 36, 410),
        ("Apple M4 Max", None, 64, 546),
        ("Apple M5 Pro", 16, 24, 307),
    ],
)
def test_apple_bins_have_their_own_bandwidth(
    chip: str, cores: int | None, memory_gib: int, bandwidth: float
) -> None:
    row = parts_table.by_chip(chip, cores, memory_gib * GIB)
    assert row is not None
    assert row.bandwidth_gbps == bandwidth


def test_an_unlisted_bin_of_a_chip_with_two_bandwidths_is_unknown() -> None:
    assert parts_table.by_chip("Apple M4 Max", 36, 64 * GIB) is None


@pytest.mark.parametrize(
    ("cpu", "row"),
    [
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "Ryzen AI Max+ 395 (Strix Halo)"),
        ("AMD Ryzen AI Max+ 395 with Radeon 8060S", "Ryzen AI Max+ 395 (Strix Halo)"),
        ("Intel(R) Core(TM) Ultra 7 258V", "Core Ultra 200V / Arc 140V,130V (Lunar Lake)"),
        ("AMD Ryzen 7 5800X 8-Core Processor", None),
    ],
)
def test_a_processor_with_shared_memory_is_known_by_name_in_any_case(
    cpu: str, row: str | None
) -> None:
    found = parts_table.by_cpu(cpu)
    assert (found.name if found else None) == row


def test_missing_compute_is_derived_within_a_family_and_marked_as_derived() -> None:
    row = next(row for row in parts_table.rows() if row.name == "M4 Max (32-core GPU)")
    fp16 = parts_table.device_fields(row)["fp16_tflops"]
    assert (fp16.value, fp16.basis) == (pytest.approx(18.4 * 32 / 40, abs=0.05), "derived")
    laptop = next(row for row in parts_table.rows() if row.name == "GeForce RTX 4090 Laptop")
    # its power limit decides, so this is not derived
    assert parts_table.device_fields(laptop)["fp16_tflops"] is None


# The hardware names from users' machines that the table knows. The others are older or rarer and
# stay unknown.
COMMUNITY_KNOWN = {
    "AMD Radeon RX 6800", "AMD Radeon RX 7900 XT", "AMD Radeon RX 9060 XT", "AMD Radeon RX 9070 XT",
    "NVIDIA GB10",
    "NVIDIA GeForce RTX 2070 SUPER", "NVIDIA GeForce RTX 2080", "NVIDIA GeForce RTX 3080",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4060 Laptop GPU", "NVIDIA GeForce RTX 4060 Ti",
    "NVIDIA GeForce RTX 4070 Ti",
    "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5070", "NVIDIA GeForce RTX 5070 Laptop GPU",
    "NVIDIA GeForce RTX 5070 Ti", "NVIDIA GeForce RTX 5090 Laptop GPU", "Radeon AI PRO R9700",
    "Radeon RX 9060 XT",
    "Tesla T4", "AMD Radeon 780M Graphics", "Intel Arc Graphics 130V/140V (integrated)",
    "Intel(R) Arc(TM) B390 GPU",
    "Radeon 840M / 860M Graphics", "NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1070",
    "NVIDIA GeForce GTX 1050 Ti",
    "NVIDIA GeForce GTX 1650", "NVIDIA GeForce GTX 1650 with Max-Q Design",
    "NVIDIA GeForce RTX 3050 Ti Laptop GPU",
}  # fmt: skip


def test_reported_device_strings_find_the_right_row_or_none() -> None:
    machines = json.loads(
        (recordings.FOLDER / "community_hardware.json").read_text(encoding="utf-8")
    )["machines"]
    names = {machine["hardwareName"] for machine in machines if machine["os"] != "macos"}
    found = {name for name in names if parts_table.by_gpu_name(name) is not None}
    assert names >= COMMUNITY_KNOWN
    assert found == COMMUNITY_KNOWN
    # two parts in one name, of the same memory: the smaller
    smaller = parts_table.by_gpu_name("Radeon 840M / 860M Graphics")
    assert smaller is not None
    assert "840M" in smaller.name
    for machine in machines:
        if machine["os"] == "macos":
            assert (
                parts_table.by_chip(machine["cpu"], None, int(machine["ramGb"] * GIB)) is not None
            )
