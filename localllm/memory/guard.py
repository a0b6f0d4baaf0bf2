"""Keep memory free for the system: check loads, and make a running engine release memory.

The available memory is compared with the headroom reserved for the system
(`account.headroom_bytes`):

    available ≥ headroom     none     models that fit above the headroom may be loaded.
                                      The prefix cache may grow.
    below the headroom       shrink   The prefix cache stops growing.
                                      It evicts the oldest entries until the headroom is free.
    below half of it         hold     In addition, no request joins the running batch
                                      if that takes memory.

A level ends only when available memory exceeds its threshold by a quarter of the headroom. This
avoids flapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localllm.errors import DoesNotFitError
from localllm.formatting import gb
from localllm.memory.account import Memory, headroom_bytes, shared_pool
from localllm.memory.macos import Pressure
from localllm.memory.system import SystemMemory, process_and_children
from localllm.memory.verdict import has_room

Available = Callable[[], int | None]

_HOLD_SHARE = 0.5
_HYSTERESIS_SHARE = 0.25
_CHECK_S = 0.25


def judge(
    available_bytes: int | None, headroom_bytes: int, previous: Pressure = "none"
) -> Pressure:
    """Return the pressure level for `available_bytes`. `previous` is the previous level.

    Unknown availability means no pressure.
    """
    if available_bytes is None or headroom_bytes <= 0:
        return "none"
    hold_below = _HOLD_SHARE * headroom_bytes
    shrink_below = float(headroom_bytes)
    if previous != "none":
        shrink_below += _HYSTERESIS_SHARE * headroom_bytes
    if previous == "hold":
        hold_below += _HYSTERESIS_SHARE * headroom_bytes
    if available_bytes < hold_below:
        return "hold"
    if available_bytes < shrink_below:
        return "shrink"
    return "none"


def check_load(name: str, planned_bytes: int, account: Memory | None) -> None:
    """Raise DoesNotFitError unless `account` has room for `planned_bytes`.

    If the size is unknown (0 planned, or no account), or if the account reserves no bytes for the
    system, the check passes. Then only the plan decides.
    """
    if not planned_bytes or account is None or not account.system_bytes:
        return
    free = account.available_bytes
    if has_room(planned_bytes, free):
        return
    available = account.total_bytes - account.others_bytes
    raise DoesNotFitError(
        f"{name} needs {gb(planned_bytes, 2)}, but only {gb(free, 2)} are free for it now: "
        f"{gb(available, 2)} available, of which {gb(account.system_bytes, 2)} stay with the "
        f"system; other programs use {gb(account.others_bytes, 2)} of {gb(account.total_bytes, 2)}",
        hint="close other programs, or use a smaller --context, a smaller quant or another model",
    )


def check_before_load(
    name: str, planned_bytes: int, headroom: int | None = None, available: Available | None = None
) -> None:
    """Run `check_load` against the memory that is free now.

    `headroom`: reserved bytes (None: by the machine's size).
    `available`: returns the available bytes (None: read from the system).
    """
    if not planned_bytes:
        return
    account = SystemMemory(process_and_children).account(headroom)
    free = available() if available is not None else None
    if account is not None and free is not None:
        account = shared_pool(account.total_bytes, free, account.source, headroom)
    check_load(name, planned_bytes, account)


def memory_is_short() -> bool:
    """True if less memory is free than is reserved for the system."""
    system = SystemMemory(process_and_children)
    account = system.account()
    if account is None:
        return False
    pressure = system.pressure()
    if pressure is None:
        pressure = judge(account.total_bytes - account.others_bytes, account.system_bytes)
    return pressure != "none"


def _not_reported() -> None:
    """Default for systems that do not report memory pressure."""


@dataclass
class MemoryGuard:
    """Memory pressure as seen by a running engine.

    Call `update` at intervals, then read `pressure` and `missing_bytes`. `system_pressure` is the
    system's own report (macOS). It takes precedence over the available bytes.
    """

    available: Available
    headroom_bytes: int
    system_pressure: Callable[[], Pressure | None] = _not_reported
    pressure: Pressure = "none"
    available_bytes: int | None = None
    _next_update_s: float = float("-inf")

    def update(self, now_s: float, *, force: bool = False) -> bool:
        """Read the available memory, at most four times a second unless forced. Returns True if it
        was read."""
        if self.headroom_bytes <= 0 or (now_s < self._next_update_s and not force):
            return False
        self._next_update_s = now_s + _CHECK_S
        self.available_bytes = self.available()
        self.pressure = self.system_pressure() or judge(
            self.available_bytes, self.headroom_bytes, self.pressure
        )
        return True

    @property
    def missing_bytes(self) -> int:
        """Bytes to release until the headroom is free again.

        If only the system reports that memory is short, this is at least a quarter of the headroom
        at each update.
        """
        missing = 0
        if self.available_bytes is not None:
            missing = max(0, self.headroom_bytes - self.available_bytes)
        if self.system_pressure() in ("shrink", "hold"):
            return max(missing, int(_HYSTERESIS_SHARE * self.headroom_bytes))
        return missing

    @property
    def free_bytes(self) -> int | None:
        """Bytes above the headroom at the last update; None if they are unknown."""
        if self.pressure != "none":
            return 0
        if self.available_bytes is None:
            return None
        return max(0, self.available_bytes - self.headroom_bytes)

    def reason(self) -> str:
        """The state in one sentence, for an error message."""
        return (
            f"this machine has {gb(self.available_bytes or 0, 2)} of memory left, but "
            f"{gb(self.headroom_bytes, 2)} are reserved for the system"
        )

    def snapshot(self) -> dict[str, int | str]:
        """The state as plain values; available_bytes is missing while it is unknown."""
        state: dict[str, int | str] = {}
        if self.available_bytes is not None:
            state["available_bytes"] = self.available_bytes
        state["headroom_bytes"] = self.headroom_bytes
        state["pressure"] = self.pressure
        return state


def guard_of(available: Available | None, headroom: int | None) -> MemoryGuard:
    """Return a guard of the memory that `available` returns (None: system memory).

    `headroom`: reserved bytes (None: by the machine's size).
    """
    system = SystemMemory()
    if headroom is None:
        headroom = headroom_bytes(system.total_bytes)
    if available is not None:
        return MemoryGuard(available, headroom)
    return MemoryGuard(system.available_bytes, headroom, system.pressure)
