"""Memory channels from the firmware's list of modules. They are counted by socket, controller and
channel, never by modules."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.device.machines import identify
from localllm.device.parsers import linux, windows
from localllm.device.parsers.dimms import Stick, ram_of
from localllm.device.types import Figure, Readings


def sticks(*places: str, bits: int = 64) -> list[Stick]:
    return [Stick(place, 3200, bits) for place in places]


CONTROLLERS = [f"BANK 0 Controller{c}-Channel{x}" for c in (0, 1) for x in "ABCD"]

# Public dmidecode and CIM outputs, and the width of the bus in bits.
TABLE: list[tuple[str, Sequence[Stick], int]] = [
    (
        "12th Gen laptop, two controllers",
        sticks("BANK 0 Controller0-ChannelA-DIMM0", "BANK 0 Controller1-ChannelA-DIMM0"),
        128,
    ),
    ("one stick", sticks("BANK 0 Controller1-ChannelA-DIMM0"), 64),
    (
        "Z690, slots by letters",
        sticks("BANK 0 Controller0-DIMMA2", "BANK 0 Controller1-DIMMB2"),
        128,
    ),
    ("soldered LPDDR4X, eight records of 16 bits", sticks(*CONTROLLERS, bits=16), 128),
    ("the same, as Windows prints it", sticks(*CONTROLLERS), 128),
    (
        "Strix Halo, eight of 32 bits",
        sticks(*(f"P0 CHANNEL {c} DIMM 0" for c in "ABCDEFGH"), bits=32),
        256,
    ),
    ("AM5, four sticks", sticks(*(f"P0 CHANNEL {c} DIMM {n}" for c in "AB" for n in (0, 1))), 128),
    (
        "Supermicro",
        sticks(
            *(
                f"P0_Node0_Channel{c}_Dimm{n} DIMM{x}{n + 1}"
                for c, x in ((0, "A"), (1, "B"))
                for n in (0, 1)
            )
        ),
        128,
    ),
    ("one locator for both", sticks("BANK 0 Channel-0-DIMM-0", "BANK 0 Channel-0-DIMM-0"), 128),
    ("NUC", sticks("Channel A Slot 0 DIMM 1", "Channel B Slot 0 DIMM 2"), 128),
    (
        "DL360p, two sockets",
        sticks(
            *(
                f"Not Specified PROC  {p} DIMM {d:2d}"
                for p in (1, 2)
                for d in (1, 2, 4, 5, 8, 9, 11, 12)
            )
        ),
        512,
    ),
    (
        "a desktop that numbers its four",
        sticks(*(f"Not Specified DIMM{n}" for n in (1, 2, 3, 4))),
        128,
    ),
    (
        "R730, A1 to B12",
        sticks(*(f"Not Specified {s}{n}" for s in "AB" for n in range(1, 13))),
        512,
    ),
    ("ASUS", sticks("BANK 1 DIMM_A2", "BANK 3 DIMM_B2"), 128),
]


@pytest.mark.parametrize(("what", "fitted", "bits"), TABLE, ids=[what for what, _, _ in TABLE])
def test_the_bus_is_as_wide_as_its_channels(what: str, fitted: Sequence[Stick], bits: int) -> None:
    ram = ram_of(fitted)
    assert ram is not None
    assert ram.bus_bits == bits
    assert ram.modules == len(fitted)
    assert ram.bandwidth_gbps == pytest.approx(3200 * bits / 8000)


@pytest.mark.parametrize(("what", "fitted", "bits"), TABLE, ids=[what for what, _, _ in TABLE])
def test_linux_and_windows_memory_modules_give_the_same_result(
    what: str, fitted: Sequence[Stick], bits: int
) -> None:
    udev = "".join(
        f"E:MEMORY_DEVICE_{i}_{key}={value}\n"
        for i, one in enumerate(fitted)
        for key, value in (
            ("LOCATOR", one.place), ("SIZE", 1 << 33), ("DATA_WIDTH", one.data_bits),
            ("SPEED_MTS", 4800),
            ("CONFIGURED_SPEED_MTS", 3200),
        )
    )  # fmt: skip
    cim = [
        {"DeviceLocator": s.place, "ConfiguredClockSpeed": 3200, "DataWidth": s.data_bits}
        for s in fitted
    ]
    assert linux.udev_memory(udev) == windows.physical_memory(json.dumps(cim)) == ram_of(fitted)


@given(st.integers(1, 24), st.sampled_from([0, 2, 4, 6, 8, 12]))
def test_modules_without_a_channel_count_as_at_most_the_processors_channels(
    n: int, channels: int
) -> None:
    ram = ram_of(sticks(*(f"slot {i}" for i in range(n))), channels)
    assert ram is not None
    assert 64 <= ram.bus_bits <= 64 * min(n, channels or n)
    assert n < 3 or channels or ram.bus_bits < 64 * n


def test_a_known_processor_determines_the_number_of_channels() -> None:
    udev = "".join(
        f"E:MEMORY_DEVICE_{i}_{k}={v}\n"
        for i in range(8)
        for k, v in (("SIZE", 1 << 35), ("DATA_WIDTH", 64), ("SPEED_MTS", 3200))
    )
    files = {
        "/proc/meminfo": "MemTotal: 264000000 kB\nMemAvailable: 200000000 kB\n",
        "/proc/cpuinfo": "processor: 0\nmodel name : AMD Ryzen Threadripper PRO 5995WX 64-Cores\n",
        "/run/udev/data/+dmi:id": udev,
    }
    bandwidth = identify(Readings("linux", "x86_64", files)).bandwidth_gbps
    assert bandwidth is not None
    assert bandwidth.value == pytest.approx(204.8)


@pytest.mark.parametrize(("measured", "said"), [(22.0, True), (45.0, False), (140.0, True)])
def test_a_measured_bandwidth_is_used_and_compared_with_that_of_the_modules(
    measured: float, said: bool
) -> None:
    udev = "".join(
        f"E:MEMORY_DEVICE_{i}_{k}={v}\n"
        for i, c in enumerate("AB")
        for k, v in (
            ("SIZE", 1 << 34),
            ("DATA_WIDTH", 64),
            ("SPEED_MTS", 3200),
            ("LOCATOR", f"DIMM_{c}1"),
        )
    )
    files = {
        "/proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable: 20000000 kB\n",
        "/run/udev/data/+dmi:id": udev,
    }
    device = identify(Readings("linux", "x86_64", files), Figure(measured, "measured", "today"))
    assert device.bandwidth_gbps == Figure(measured, "measured", "today")
    assert any("memory was measured at" in f.message for f in device.findings) == said


@pytest.mark.parametrize(
    "odd", [{"Speed": 0}, {"Speed": 10**9}, {"Speed": "fast"}, {"Speed": 3200, "DataWidth": 4096}]
)
def test_impossible_memory_modules_are_ignored(odd: dict[str, object]) -> None:
    assert windows.physical_memory(json.dumps([odd])) is None
