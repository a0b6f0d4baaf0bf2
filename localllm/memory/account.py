"""The account of one memory pool: its size, reserved bytes, bytes of other programs, and the
rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from localllm.formatting import gb

Basis = Literal["measured", "reported", "datasheet", "derived", "assumed", "given"]
"""How a number is known."""

_MIB = 2**20
# A GB10 that fills its pool freezes rather than failing an allocation (seen at 97 %): 5 % stay
# free. https://docs.nvidia.com/dgx/dgx-spark/known-issues.html
_HEADROOM_SHARE = 0.05
# A desktop's short-term needs (a browser tab, a compiler) are of this size on all machines.
_MIN_HEADROOM_BYTES = 512 * _MIB
# A board of 1 or 2 GiB could load no model if it reserved that much, so there is an upper bound.
_MAX_HEADROOM_SHARE = 0.125


def headroom_bytes(total_bytes: int | None) -> int:
    """Bytes reserved for the system out of `total_bytes` of memory: 5 %, at least 512 MiB but at
    most 1/8.

    Returns 0 if the total is unknown: then only the plan decides.
    """
    if not total_bytes:
        return 0
    wanted = max(_MIN_HEADROOM_BYTES, _HEADROOM_SHARE * total_bytes)
    return int(min(wanted, _MAX_HEADROOM_SHARE * total_bytes))


@dataclass(frozen=True, slots=True)
class Memory:
    """The account of one memory pool in bytes: a card, a pool that CPU and GPU share, or system
    memory.

    `total_bytes`: installed memory.
    `limit_bytes`: the most a model may ever use (hard limit).
    `available_bytes`: free now (soft, <= limit).
    `system_bytes`: reserved for the system or the driver, including a card's margin.
    `others_bytes`: in use by other programs, so not available to a model.
    `carve_out_bytes`: free bytes that the BIOS assigned to integrated graphics, so they are not
    system memory.
    """

    total_bytes: int
    limit_bytes: int
    available_bytes: int
    basis: Basis
    source: str = ""
    system_bytes: int = 0
    others_bytes: int = 0
    carve_out_bytes: int = 0

    @property
    def loadable_bytes(self) -> int:
        """The most that may be loaded now. For a card this leaves its margin free."""
        return max(0, min(self.limit_bytes, self._unused_bytes))

    @property
    def _unused_bytes(self) -> int:
        return self.total_bytes - self.system_bytes - self.others_bytes

    def account(self) -> str:
        """The account in one line.

        Example: "22.9 GB for a model, of 25.8 GB: the system reserves 0.5 GB and other programs use
        2.4 GB".
        """
        reasons = []
        if self.system_bytes:
            reasons.append(f"the system reserves {gb(self.system_bytes, 1)}")
        if self.others_bytes:
            reasons.append(f"other programs use {gb(self.others_bytes, 1)}")
        if self.limit_bytes < self._unused_bytes:
            reasons.append(f"{self.source} allows {gb(self.limit_bytes, 1)}")
        causes = " and ".join(reasons) or "all of it is free"
        return f"{gb(self.loadable_bytes, 1)} for a model, of {gb(self.total_bytes, 1)}: {causes}"


def shared_pool(
    total_bytes: int, available_bytes: int, source: str, headroom: int | None = None
) -> Memory:
    """The account of system memory, or of a pool that CPU and GPU share (GB10, Jetson).

    All of it except the headroom may be loaded.

    `available_bytes`: must include reclaimable page cache (MemAvailable, never MemFree).
    `headroom`: reserved bytes (None: by the machine's size).
    """
    keep = headroom
    if keep is None:
        keep = headroom_bytes(total_bytes)
    limit = max(total_bytes - keep, 0)
    available = max(min(available_bytes - keep, limit), 0)
    others = max(total_bytes - available_bytes, 0)
    return Memory(total_bytes, limit, available, "reported", source, keep, others)


def keeping(memory: Memory, n_bytes: int, *, others_bytes: int) -> Memory:
    """Return the account with `n_bytes` reserved for the system instead of the assumed bytes.

    `others_bytes`: the bytes of other programs.
    """
    keep = min(n_bytes, memory.total_bytes)
    limit = max(0, min(memory.limit_bytes + memory.system_bytes, memory.total_bytes) - keep)
    return replace(
        memory,
        limit_bytes=limit,
        available_bytes=max(0, min(memory.total_bytes - keep - others_bytes, limit)),
        system_bytes=keep,
        others_bytes=others_bytes,
    )


def with_released(memory: Memory, n_bytes: int) -> Memory:
    """The account after other programs released `n_bytes`."""
    freed = min(max(n_bytes, 0), memory.others_bytes)
    return replace(
        memory,
        others_bytes=memory.others_bytes - freed,
        available_bytes=min(memory.limit_bytes, memory.available_bytes + freed),
    )
