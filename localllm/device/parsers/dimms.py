"""Derive the width of the memory bus from firmware's list of modules.

Channels are counted, not sticks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_CHANNEL_BITS = 64
# A memory controller with its own name in firmware ("Controller0-ChannelA": Intel since Alder Lake)
# is 64 bits wide. It has one channel of DDR4, two of 32 bits (DDR5) or four of 16 (LPDDR).


@dataclass(frozen=True, slots=True)
class Ram:
    """Installed memory: transfers per second, populated channels × bits, and number of modules."""

    megatransfers_s: int
    bus_bits: int
    modules: int

    @property
    def bandwidth_gbps(self) -> float:
        """MT/s × bits ÷ 8, in decimal GB/s: the peak of the populated channels."""
        return self.megatransfers_s * self.bus_bits / 8 / 1000


@dataclass(frozen=True, slots=True)
class Stick:
    """One memory module.

    - `place`: its position as firmware names it ("BANK 0 Controller1-ChannelA-DIMM0").
    - `megatransfers_s`: MT/s.
    - `data_bits`: data width in bits.
    """

    place: str
    megatransfers_s: int
    data_bits: int = _CHANNEL_BITS


def ram_of(sticks: Sequence[Stick], channels: int = 0) -> Ram | None:
    """Combine `sticks` into the installed memory. The slowest speed counts.

    Returns None without sticks, or if a stick has an implausible speed or width. `channels` is the
    number of 64-bit channels per socket (0 = the processor is unknown).
    """
    if not sticks or not all(_is_plausible(stick) for stick in sticks):
        return None
    sockets = {_socket_controller_channel(stick)[0] for stick in sticks}
    bus_bits = _bus_bits(sticks, channels)
    # Firmware may report a 32-bit channel of soldered memory with the width of a module.
    if channels:
        bus_bits = min(bus_bits, channels * _CHANNEL_BITS * len(sockets))
    return Ram(min(s.megatransfers_s for s in sticks), bus_bits, len(sticks))


def _is_plausible(stick: Stick) -> bool:
    return 100 <= stick.megatransfers_s <= 20_000 and 0 < stick.data_bits <= 512


def _bus_bits(sticks: Sequence[Stick], channels: int) -> int:
    if all(stick.data_bits < _CHANNEL_BITS for stick in sticks):
        # Soldered: each record is a separate piece of a channel.
        return sum(stick.data_bits for stick in sticks)
    places = [_socket_controller_channel(stick) for stick in sticks]
    # If several sticks share a place, firmware does not know the places.
    if len({stick.place for stick in sticks}) == len(sticks) and all(place[2] for place in places):
        return _populated_bits(places)
    if channels:
        return _CHANNEL_BITS * len(sticks)
    sockets = Counter(socket for socket, _, _ in places)
    return _CHANNEL_BITS * sum(_assumed_channels(n_sticks) for n_sticks in sockets.values())


def _populated_bits(places: Sequence[tuple[str, str, str]]) -> int:
    """Return the bits of the populated channels, at most 64 for each named controller."""
    n_channels = Counter((socket, controller) for socket, controller, _ in set(places))
    return _CHANNEL_BITS * sum(1 if controller else n for (_, controller), n in n_channels.items())


def _assumed_channels(n_sticks: int) -> int:
    """Return the smallest number of channels that `n_sticks` in one socket fill.

    It is two for two or four sticks, and four for eight or twelve.
    """
    if n_sticks <= 2:
        return n_sticks
    return max(2, 1 << (n_sticks // 2).bit_length() - 1)


def _socket_controller_channel(stick: Stick) -> tuple[str, str, str]:
    """Return socket, controller and channel, as far as firmware names them."""
    text = stick.place.upper()
    socket = re.search(r"\b(?:P|PROC|CPU|NODE)[ _-]*([0-9])(?![0-9])", text)
    controller = re.search(r"\b(?:CONTROLLER|MC)[ _-]?([0-9])", text)
    channel = re.search(r"CHANNEL[ _-]?([A-P0-9]+)|DIMM[ _-]?([A-P])(?:[ _-]?[0-9]+)?\b", text)
    # Dell's servers: A1 to A12 belong to the first processor.
    if socket is None and channel is None:
        socket = re.search(r"(?:^|\s)([A-H])[0-9]{1,2}$", text)
    return (
        socket[1] if socket else "",
        controller[1] if controller else "",
        (channel[1] or channel[2]) if channel else "",
    )
