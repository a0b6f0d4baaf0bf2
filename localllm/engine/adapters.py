"""Sets of LoRA adapters: which one a request uses, the name of its KV, and which one is next.

A set is a tuple with the scale of each adapter that the backend has loaded; 0 means that the adapter
is not applied. All requests in a step use the same set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from localllm_backends.contract import ModelInfo

AdapterSet: TypeAlias = tuple[float, ...]
# `Generation.adapters`: (number, scale) of the adapters that a request names, or None.
SentAdapters: TypeAlias = Sequence[tuple[int, float]] | None
# The steps of a turn take at least this many times as long as the switch to its set. So switching
# takes at most 4 % of the time. With 8, four streams of SmolLM2-135M on two sets lost another 6 %.
_TURN_PER_SWITCH = 24.0
# The second step shows how long the first would have taken without the switch.
_MIN_STEPS = 2
# Share of the newest measurement in the learnt time of a switch.
_NEWEST_SHARE = 0.25


def unknown_adapters(info: ModelInfo, sent: SentAdapters) -> str:
    """Why a request can't be computed: it names an adapter that is not loaded. "" if it can."""
    n_loaded = len(info.adapters)
    unknown = [number for number, _ in sent or () if not 0 <= number < n_loaded]
    if not unknown:
        return ""
    if not n_loaded:
        return f"there is no adapter {unknown[0]}: the model was loaded without adapters"
    return f"there is no adapter {unknown[0]}: the model's adapters are 0 to {n_loaded - 1}"


def set_of(info: ModelInfo, sent: SentAdapters) -> AdapterSet:
    """The set that a request uses. Its adapters must be known."""
    if sent is None:
        return tuple(scale for _, scale in info.adapters)
    scales = [0.0] * len(info.adapters)
    for number, scale in sent:
        scales[number] = scale
    return tuple(scales)


def set_name(adapters: Iterable[tuple[str, float]]) -> str:
    """The name of the KV of a set: its adapters by the hash of their contents, with their scales.
    It is "" if no adapter is applied."""
    return "+".join(sorted(f"{digest}:{float(scale)!r}" for digest, scale in adapters if scale))


def adapted_weights(weights: str, name: str) -> str:
    """The identity of `weights` with the set called `name`; "": no adapter is applied."""
    if not name:
        return weights
    return hashlib.sha256(f"{weights} {name}".encode()).hexdigest()[:32]


def named_adapters(info: ModelInfo, adapters: AdapterSet) -> list[tuple[str, float]]:
    """The applied adapters of a set, as (hash of the contents, scale)."""
    pairs = zip(info.adapters, adapters, strict=True)
    return [(digest, scale) for (digest, _), scale in pairs if scale]


def adapted_fingerprint(info: ModelInfo, sent: SentAdapters) -> str:
    """The identity of the weights with a request's set, whatever draft heads are loaded."""
    weights = info.fingerprint.partition("-")[0]
    return adapted_weights(weights, set_name(named_adapters(info, set_of(info, sent))))


def kv_salt(info: ModelInfo, sent: SentAdapters, salt: str) -> str:
    """The salt of a request's KV, from its own `salt` and its set. Requests share KV only if both are
    equal."""
    name = set_name(named_adapters(info, set_of(info, sent)))
    if name:
        return f"\0{name}\0{salt}"
    return salt


@dataclass
class AdapterTurns:
    """Decides which set the next step uses.

    A set keeps its turn until the turn is long compared with the switch that it took. Then the set
    that has waited longest is next. So while a set waits, no other set gets two turns.

    `active`: the set of the last step. `switches`: how often it changed. `switch_s`: the learnt
    time that a switch adds to the next step.
    """

    active: AdapterSet = ()
    switches: int = 0
    switch_s: float = 0.0
    _waiting: list[AdapterSet] = field(default_factory=list)
    _turn_s: float = 0.0
    # The step that followed the last switch: its seconds and its number of tokens.
    _first: tuple[float, int] | None = None
    _steps: int = 0

    def choose(self, ready: Sequence[AdapterSet]) -> AdapterSet:
        """The set of the next step. `ready` are the sets of the requests that could be in it, in
        any order and number."""
        present = dict.fromkeys(ready)
        self._waiting = [s for s in self._waiting if s in present and s != self.active]
        known = {self.active, *self._waiting}
        self._waiting += [s for s in present if s not in known]
        if self._waiting and (self.active not in present or self._turn_is_over):
            if self.active in present:
                self._waiting.append(self.active)
            self.active = self._waiting.pop(0)
            self.switches += 1
            self._turn_s = 0.0
            self._steps = 0
            self._first = None
        return self.active

    def snapshot(self) -> dict[str, float | int]:
        """The counters, as plain values."""
        return {"adapter_switches": self.switches, "adapter_switch_s": self.switch_s}

    @property
    def others_wait(self) -> bool:
        """True if another set than the active one has requests that could be in the next step."""
        return bool(self._waiting)

    @property
    def _turn_is_over(self) -> bool:
        return self._steps >= _MIN_STEPS and self._turn_s >= _TURN_PER_SWITCH * self.switch_s

    def end(self) -> None:
        """End the turn, because no request of the active set can continue now."""
        self._steps = _MIN_STEPS
        self._turn_s = float("inf")

    def stepped(self, n_tokens: int, seconds: float) -> None:
        """Record a step of the active set."""
        self._steps += 1
        self._turn_s += seconds
        if self._steps == 1:
            self._first = seconds, n_tokens
        elif self._steps == 2 and self._first is not None and self.switches:
            first_s, first_tokens = self._first
            if first_tokens == n_tokens:
                took_s = max(0.0, first_s - seconds)
                if self.switch_s:
                    took_s = self.switch_s + _NEWEST_SHARE * (took_s - self.switch_s)
                self.switch_s = took_s
