"""Bandwidth of system memory, from a stated kind or from the kinds that a processor takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from localllm.device.types import Basis, Figure

# MT/s if only the kind was stated: JEDEC's usual rates.
_USUAL_MT_S = {"ddr3": 1600, "ddr4": 3200, "ddr5": 4800, "lpddr4x": 4267, "lpddr5": 6400}
_USUAL_MT_S["lpddr5x"] = 7500
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

    def with_more(self, newer: StatedRam) -> StatedRam:
        """Merge two statements about the same memory."""
        return StatedRam(
            self.size_gb or newer.size_gb,
            newer.kind or self.kind,
            newer.rate or self.rate,
            newer.channels or self.channels,
        )

    def bandwidth(self, kinds: Sequence[str], channels: int, *, known: bool = True) -> Figure:
        """Return the peak GB/s of this memory on a part with `channels` channels.

        `kinds` are the memory kinds that the part takes ("DDR5-5600"), the usual one first. The
        basis is "given" if the rate was stated, and "derived" if a `known` part leaves no choice.
        Otherwise it is "assumed", and the source lists the rates of the other kinds.
        """
        fallback_kind = f"{self.kind}-{_USUAL_MT_S.get(self.kind, _OLDEST_MT_S)}"
        prefix = f"{self.kind}-" if self.kind else ""
        usual_kind = next(
            (kind for kind in kinds if kind.lower().startswith(prefix)), fallback_kind
        )
        kind, _, usual_rate = usual_kind.rpartition("-")
        rate = self.rate or int(usual_rate)
        n_channels = self.channels or channels
        other_kinds = [] if self.kind or self.rate else list(kinds[1:])
        basis_text = (
            f"{_CHANNELS_TEXT.get(n_channels, f'{n_channels} channels')} of {kind.upper()}-{rate}"
        )
        for other_kind in other_kinds:
            other_gbps = _gbps(int(other_kind.rpartition("-")[2]), n_channels)
            basis_text += f"; {other_gbps:g} GB/s if it is {other_kind}"
        is_certain = known and not other_kinds and usual_kind in kinds
        basis: Basis
        if self.rate:
            basis = "given"
        elif is_certain:
            basis = "derived"
        else:
            basis = "assumed"
        return Figure(_gbps(rate, n_channels), basis, basis_text)


_CHANNELS_TEXT = {1: "one channel", 2: "two channels"}
_OLDEST_MT_S = 800


def _gbps(megatransfers_s: int, channels: int) -> float:
    return round(megatransfers_s * channels * _CHANNEL_BYTES / 1000, 3)


# No statement about system memory.
NO_RAM = StatedRam(None)
