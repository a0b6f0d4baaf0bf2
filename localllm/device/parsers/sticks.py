"""Memory modules as firmware lists them to the width of the memory bus: channels are counted, not
sticks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_CHANNEL_BITS = 64
# A memory controller that firmware names apart ("Controller0-ChannelA": Intel since Alder Lake) is
# one such channel wide, whether it has one of DDR4, two of 32 bits (DDR5) or four of 16 (LPDDR).


@dataclass(frozen=True, slots=True)
class Ram:
    """Installed memory: transfers per second, populated channels × bits, and how many modules."""

    megatransfers_s: int
    bus_bits: int
    modules: int

    @property
    def bandwidth_gbps(self) -> float:
        """MT/s × bits ÷ 8, decimal GB/s: the peak of the populated channels."""
        return self.megatransfers_s * self.bus_bits / 8 / 1000


@dataclass(frozen=True, slots=True)
class Stick:
    """One module: where it sits as firmware words it ("BANK 0 Controller1-ChannelA-DIMM0"), its
    MT/s, its data width in bits."""

    place: str
    megatransfers_s: int
    data_bits: int = _CHANNEL_BITS


def ram_of(sticks: Sequence[Stick], channels: int = 0) -> Ram | None:
    """The memory that `sticks` are; None of none, or where one has a speed or width that no memory
    has. The slowest speed counts.
    `channels`: of 64 bits of each socket, where the processor is known (0: it is not)."""
    if not sticks or not all(_is_plausible(stick) for stick in sticks):
        return None
    sockets = {_place(stick)[0] for stick in sticks}
    bits = _bus_bits(sticks, channels)
    if channels:  # firmware gives a 32-bit channel of soldered memory the width of a module's
        bits = min(bits, channels * _CHANNEL_BITS * len(sockets))
    return Ram(min(s.megatransfers_s for s in sticks), bits, len(sticks))


def _is_plausible(stick: Stick) -> bool:
    return 100 <= stick.megatransfers_s <= 20_000 and 0 < stick.data_bits <= 512


def _bus_bits(sticks: Sequence[Stick], channels: int) -> int:
    if all(stick.data_bits < _CHANNEL_BITS for stick in sticks):
        # soldered: each record is a piece of a channel, and none shares one
        return sum(stick.data_bits for stick in sticks)
    places = [_place(stick) for stick in sticks]
    # One place for all is none that firmware knows: two sticks can't sit in one.
    if len({stick.place for stick in sticks}) == len(sticks) and all(p[2] for p in places):
        return _placed_bits(places)
    if channels:
        return _CHANNEL_BITS * len(sticks)
    sockets = Counter(socket for socket, _, _ in places)
    return _CHANNEL_BITS * sum(_usual_channels(n) for n in sockets.values())


def _placed_bits(places: Sequence[tuple[str, str, str]]) -> int:
    """The bits of the channels that are filled, of each controller no more than it has."""
    filled = Counter((socket, controller) for socket, controller, _ in set(places))
    return _CHANNEL_BITS * sum(1 if controller else n for (_, controller), n in filled.items())


def _usual_channels(n_sticks: int) -> int:
    """Channels that so many sticks of one socket fill at least: two of two, two of four, four of
    eight or twelve."""
    if n_sticks <= 2:
        return n_sticks
    return max(2, 1 << (n_sticks // 2).bit_length() - 1)


def _place(stick: Stick) -> tuple[str, str, str]:
    """Socket, controller and channel as far as firmware says them."""
    text = stick.place.upper()
    socket = re.search(r"\b(?:P|PROC|CPU|NODE)[ _-]*([0-9])(?![0-9])", text)
    controller = re.search(r"\b(?:CONTROLLER|MC)[ _-]?([0-9])", text)
    channel = re.search(r"CHANNEL[ _-]?([A-P0-9]+)|DIMM[ _-]?([A-P])(?:[ _-]?[0-9]+)?\b", text)
    if socket is None and channel is None:  # Dell's servers: A1 to A12 are the first processor's
        socket = re.search(r"(?:^|\s)([A-H])[0-9]{1,2}$", text)
    return (
        socket[1] if socket else "",
        controller[1] if controller else "",
        (channel[1] or channel[2]) if channel else "",
    )
