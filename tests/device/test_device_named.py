"""Any machine by name: the reference list in three spellings each, traps, overrides, nearest suggestions."""

from __future__ import annotations

import pytest

from localllm.device import table
from localllm.device.named import nearest, overridden, resolve
from localllm.device.types import DeviceNotFoundError
from localllm.errors import NotFoundError, UsageError

GIB = 1 << 30

REFERENCE = {
    "Jetson Orin Nano Super 8GB": ["Jetson Orin Nano Super", "orin nano super", "jetson orin-nano super 8gb"],
    "DGX Spark Founders Edition (GB10)": ["DGX Spark (GB10)", "dgx spark", "NVIDIA GB10", "dgxspark"],
    "Ryzen AI Max+ 395 (Strix Halo)": [
        "Strix Halo 395",
        "strix halo",
        "Ryzen AI Max+ 395",
        "AMD RYZEN AI MAX 395 128GB",
    ],
    "M4 Max (40-core GPU)": ["M4 Max", "M4 Max 128GB", "apple m4max 64", "MacBook Pro M4 Max 40-core"],
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
def test_the_reference_machines_resolve_however_they_are_typed(row: str, typed: str) -> None:
    device = resolve(typed)
    assert device.match == row
    assert device.simulated
    assert device.bandwidth_gbps is not None
    assert device.bandwidth_gbps.source


@pytest.mark.parametrize("row", table.rows(), ids=lambda row: row.name)
def test_every_row_answers_to_its_own_name(row: table.Row) -> None:
    assert resolve(row.name).match == row.name


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
def test_names_inside_longer_names_are_told_apart(typed: str, match: str) -> None:
    assert resolve(typed).match == match


def test_what_was_not_said_is_chosen_and_stated() -> None:
    device = resolve("M4 Max")
    assert any("32-core" in finding.message for finding in device.findings)
    assert any("48, 64, 128" in finding.message for finding in device.findings)
    assert not any("also means" in finding.message for finding in resolve("M4 Max 128GB").findings)


@pytest.mark.parametrize(
    ("typed", "near"), [("rtx 5095", "RTX 5090"), ("M9 Max", "Max"), ("strixhallo", "Ryzen AI Max+ 395")]
)
def test_an_unknown_name_suggests_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve(typed)
    assert isinstance(caught.value, NotFoundError)
    assert near in caught.value.hint
    assert any(near in name for name in nearest(typed))


@pytest.mark.parametrize("typed", ["", "   ", "rtx", "ryzen", "radeon", "M4 Ultra", "banana"])
def test_a_shelf_or_nothing_is_not_a_machine(typed: str) -> None:
    with pytest.raises(DeviceNotFoundError):
        resolve(typed)


def test_overrides_win_and_are_marked_given() -> None:
    device = resolve("M4 Max", memory_gb=96, bandwidth_gbps=500)
    assert device.memory.total_bytes == 96 * GIB
    assert device.memory.basis == "given"
    assert device.bandwidth_gbps is not None
    assert (device.bandwidth_gbps.value, device.bandwidth_gbps.basis) == (500, "given")


def test_an_unknown_machine_can_be_described_by_two_figures() -> None:
    device = resolve("my homemade board", memory_gb=48, bandwidth_gbps=200)
    assert device.memory.total_bytes == 48 * GIB
    assert any("not in the table" in finding.message for finding in device.findings)


@pytest.mark.parametrize("options", [{"memory_gb": 0.0}, {"memory_gb": -1.0}, {"bandwidth_gbps": float("nan")}])
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


@pytest.mark.parametrize("typed", ["dual RTX 3090", "RTX 3090 x2", "RTX 3090 ×2", "2 x rtx3090", "rtx 3090 + rtx 3090"])
def test_two_cards_can_be_said_in_many_ways(typed: str) -> None:
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
def test_a_card_can_be_named_with_the_memory_beside_it(typed: str, gbps: float, basis: str) -> None:
    device = resolve(typed)
    assert device.memory == resolve("rtx 3060 12GB").memory
    assert device.host is not None
    assert device.host.total_bytes == 64 * GIB
    assert device.host_bandwidth_gbps is not None
    assert (device.host_bandwidth_gbps.value, device.host_bandwidth_gbps.basis) == (gbps, basis)


def test_mixed_cards_keep_what_each_of_them_holds() -> None:
    device = resolve("RTX 5090 + RTX 3090 + 96GB DDR5")
    large, small = (resolve(name).memory.limit_bytes for name in ("RTX 5090", "RTX 3090"))
    assert [card.memory.limit_bytes for card in device.cards] == [large, small]
    assert device.memory.limit_bytes == large + small
    assert device.bandwidth_gbps is not None
    assert 936 < device.bandwidth_gbps.value < 1792
    assert resolve("RTX 4090 + 2x RTX 3090").n_gpus == 3


@pytest.mark.parametrize("typed", ["RTX 4090 + M4 Max", "RTX 4090 + RX 7900 XTX", "RTX 4090 + banana"])
def test_what_can_not_share_a_model_is_refused(typed: str) -> None:
    with pytest.raises((UsageError, DeviceNotFoundError)):
        resolve(typed)


def test_a_machine_with_one_memory_takes_what_is_said_as_its_size() -> None:
    assert resolve("Ryzen AI Max+ 395 + 64GB RAM").memory.total_bytes == 64 * GIB
    assert resolve("Ryzen AI Max+ 395").memory.total_bytes == 128 * GIB


def test_a_simulated_gb10_shows_what_its_system_shows_less_five_per_cent() -> None:
    memory = resolve("dgx spark").memory
    assert memory.total_bytes == pytest.approx(127600748 * 1024, rel=1e-6)
    assert memory.limit_bytes == pytest.approx(0.95 * memory.total_bytes, rel=1e-6)


def test_a_phone_is_for_planning_only() -> None:
    assert any("planning only" in finding.message for finding in resolve("iPhone 17 Pro").findings)


def test_an_unpublished_bandwidth_is_unknown_not_guessed() -> None:
    device = resolve("Jetson Orin Nano 2")
    assert device.bandwidth_gbps is None
    assert any("not published" in finding.message for finding in device.findings)


def test_the_two_sizes_of_an_a770_have_different_memory() -> None:
    """17.5 Gbps GDDR6 on the 16 GB card, 16 on the 8 GB one, both 256 bits wide."""
    for size, gbps in ((16, 560), (8, 512)):
        figure = resolve(f"Arc A770 {size}GB").bandwidth_gbps
        assert figure is not None
        assert figure.value == gbps
        row = table.by_pci("8086", "56a0", memory_bytes=size << 30)
        assert row is not None
        assert row.bandwidth_gbps == gbps


@pytest.mark.parametrize(
    "typed", ["2x 3090", "2×3090", "dual 3090", "two RTX 3090", "3090x2", "RTX 3090 x2", "rtx 3090 24GB x2"]
)
def test_two_cards_however_they_are_counted(typed: str) -> None:
    assert resolve(typed).name == "2 × GeForce RTX 3090 24 GB"


@pytest.mark.parametrize(
    ("typed", "gb"), [("rtx 3060 12gb, 64 gb ram", 64), ("3090 + 64GB", 64), ("RTX 3090 + RTX 3060 12GB + 32GB", 32)]
)
def test_a_size_behind_a_card_is_the_computers_memory(typed: str, gb: int) -> None:
    host = resolve(typed).host
    assert host is not None
    assert host.total_bytes == gb << 30
