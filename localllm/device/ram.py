"""Bandwidth of system memory, from a stated kind or from the kinds that a processor takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from localllm.device.types import Basis, Figure

# MT/s if only the kind was stated: JEDEC's usual rates.
_USUAL_RATES = {"ddr3": 1600, "ddr4": 3200, "ddr5": 4800, "lpddr4x": 4267, "lpddr5": 6400}
_USUAL_RATES["lpddr5x"] = 7500
_CHANNEL_BYTES = 8


class StatedRam(NamedTuple):
    """System memory as stated.

    - `size_gb`: GiB, or None if only the kind was stated.
    - `kind`: for example "ddr5" ("" = not stated).
    - `rate`: MT/s (0 = not stated).
    - `channels`: number of 64-bit channels (0 = not stated).
    """

    size_gb: float | None
    kind: str = ""
    rate: int = 0
    channels: int = 0

    def with_more(self, more: StatedRam) -> StatedRam:
        """Merge two statements about the same memory."""
        return StatedRam(
            self.size_gb or more.size_gb,
            more.kind or self.kind,
            more.rate or self.rate,
            more.channels or self.channels,
        )

    def bandwidth(self, kinds: Sequence[str], channels: int, *, known: bool = True) -> Figure:
        """Return the peak GB/s of this memory on a part with `channels` channels.

        `kinds` are the memory kinds that the part takes ("DDR5-5600"), the usual one first. The
        basis is "given" if the rate was stated, and "derived" if a `known` part leaves no choice.
        Otherwise it is "assumed", and the source lists the rates of the other kinds.
        """
        rest = f"{self.kind}-{_USUAL_RATES.get(self.kind, _OLDEST_RATE)}"
        begins = f"{self.kind}-" if self.kind else ""
        usual = next((kind for kind in kinds if kind.lower().startswith(begins)), rest)
        kind, _, made_for = usual.rpartition("-")
        rate = self.rate or int(made_for)
        n = self.channels or channels
        others = [] if self.kind or self.rate else list(kinds[1:])
        basis_text = f"{_COUNTED.get(n, f'{n} channels')} of {kind.upper()}-{rate}"
        for other in others:
            basis_text += f"; {_gbps(int(other.rpartition('-')[2]), n):g} GB/s if it is {other}"
        is_certain = known and not others and usual in kinds
        basis: Basis
        if self.rate:
            basis = "given"
        elif is_certain:
            basis = "derived"
        else:
            basis = "assumed"
        return Figure(_gbps(rate, n), basis, basis_text)


_COUNTED = {1: "one channel", 2: "two channels"}
_OLDEST_RATE = 800


def _gbps(rate: int, channels: int) -> float:
    return round(rate * channels * _CHANNEL_BYTES / 1000, 3)


# No statement about system memory.
NO_RAM = StatedRam(None)
