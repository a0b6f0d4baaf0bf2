"""Decide which layers, experts and KV go to a card and which stay in system memory: the fastest
placement that fits.

A model that fits on one card goes to the fastest such card. Other models go to the cards that are
predicted to decode fastest together, without cards that would only slow them down. In a mixture,
routed experts are nearly all of the bytes but few of those that a token reads. They leave the card
first, layer by layer from the front, as few as necessary. Whole layers leave only if there are no
experts to move, or if the rest is still too large. The KV cache leaves if the freed space is worth
more.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

from localllm.device.accelerators import KINDS
from localllm.device.types import Device
from localllm.memory.verdict import TIGHT_SHARE, Fits, Part
from localllm.memory.verdict import verdict as judge
from localllm.planner import layer_bytes, memory, speed
from localllm.planner.types import USUAL, MemoryNeed, RunSettings
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Variant

# If the KV's share of all bytes is below this, moving it off the card is not tried.
_MIN_KV_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Placement options that the user fixed; None = free. The fields are those of `Placement`."""

    gpu_layers: int | None = None
    experts_on_host: int | None = None
    tensor_split: tuple[float, ...] | None = None

    @property
    def is_free(self) -> bool:
        """True if layers and experts may go anywhere."""
        return self.gpu_layers is None and self.experts_on_host is None

    def applied_to(self, settings: RunSettings) -> RunSettings:
        """Return `settings` with the fixed options."""
        if self == FREE:
            return settings
        if self.gpu_layers is not None:
            settings = settings.placed(gpu_layers=self.gpu_layers)
        if self.experts_on_host is not None:
            settings = settings.placed(experts_on_host=self.experts_on_host)
        if self.tensor_split is not None:
            settings = settings.placed(tensor_split=self.tensor_split)
        return settings


FREE = OffloadOptions()


def needed_parts(device: Device, account: MemoryNeed) -> list[Part]:
    """Return the need of each memory: the accelerator's pool, each of several cards, and system
    memory.

    Nearly all loadable bytes of the pool count as available without evicting the data of other
    programs.
    """
    roomy_bytes = int(TIGHT_SHARE * min(account.limit_bytes, device.memory.loadable_bytes))
    has_cards = bool(account.cards_bytes and device.cards)
    free_bytes = device.memory.available_bytes
    if has_cards:
        free_bytes = account.limit_bytes
    parts = [Part(device.name, account.total_bytes, account.limit_bytes, free_bytes, roomy_bytes)]
    cards = zip(account.cards_bytes, account.cards_limit_bytes, strict=True)
    for i, (n_bytes, limit_bytes) in enumerate(cards):
        free_bytes = limit_bytes
        if has_cards:
            free_bytes = device.cards[i].memory.available_bytes
        parts.append(Part(f"card {i}", n_bytes, limit_bytes, free_bytes))
    if account.host_bytes and device.host is not None:
        limit_bytes = device.host.limit_bytes
        parts.append(Part("system memory", account.host_bytes, limit_bytes, limit_bytes))
    return parts


def verdict(device: Device, need: MemoryNeed, *, split: bool = False) -> Fits:
    """Return "yes", "tight" (needs more than is free now, or nearly all loadable bytes), "split"
    (part in host memory) or "no"."""
    return judge(needed_parts(device, need), split=split).fits


def over_cards(
    device: Device, model: Model, variant: Variant, settings: RunSettings
) -> RunSettings:
    """Return `settings` with the number of layers of each card; unchanged for one card, or if a
    split was given."""
    placement = settings.placement
    device = layer_bytes.with_used_cards(device, placement)
    if device.n_gpus < 2 or device.kind != "discrete" or placement.tensor_split:
        return settings
    device_layers = memory.layer_ledger(model, variant, settings).device_layers(placement)
    if not device_layers:
        return settings
    counts, _ = layer_bytes.over_cards(
        device_layers, _bytes_for_cards(device, model, variant, settings, sum(device_layers))
    )
    return settings.placed(tensor_split=tuple(float(n) for n in counts))


# The fastest cards are filled to this share of their limit before slower ones get a layer. The rest
# is lost to the size of a layer.
_MAX_FILL_SHARE = 0.95


def _bytes_for_cards(
    device: Device, model: Model, variant: Variant, settings: RunSettings, layers_bytes: int
) -> tuple[int, ...]:
    """Return the bytes of the layers' `layers_bytes` for each card, after each card's part of the
    other bytes.

    The fastest cards are filled first. If all cards have one speed, or if nearly full cards cannot
    hold the layers, the cards share by their limits.
    """
    limits = memory.cards_limits(device)
    rates = [card.bandwidth_gbps.value for card in device.cards]
    if len(set(rates)) < 2:
        return limits
    fixed_bytes = memory.need(model, variant, settings, device).total_bytes - layers_bytes
    goals = [0] * len(limits)
    remaining_bytes = layers_bytes
    for rate in sorted(set(rates), reverse=True):
        same_kind = [i for i, card_rate in enumerate(rates) if card_rate == rate]
        free_bytes = [
            max(0, int(_MAX_FILL_SHARE * limits[i]) - fixed_bytes // len(limits)) for i in same_kind
        ]
        taken_bytes = min(remaining_bytes, sum(free_bytes))
        for i, card_free_bytes in zip(same_kind, free_bytes, strict=True):
            goals[i] = taken_bytes * card_free_bytes // max(1, sum(free_bytes))
        remaining_bytes -= taken_bytes
    if remaining_bytes > 0:
        return limits
    return tuple(goals)


def pinned(device: Device, settings: RunSettings, need: MemoryNeed) -> RunSettings:
    """Return `settings` with weights read into memory instead of mapped, if CUDA has some of them
    in system memory. That much memory must be free.

    llama.cpp then keeps them in pinned buffers. Prefill copies them to the card faster from there
    than from a mapped file (src/llama-model-loader.cpp states this). If the driver cannot pin more,
    llama.cpp uses ordinary memory.
    """
    if not KINDS[device.accelerator].pins_host_weights:
        return settings
    if settings.placement.weights != USUAL.placement.weights or device.host is None:
        return settings
    if need.host_bytes > device.host.available_bytes:
        return settings
    return settings.placed(weights="read")


# Most choices of cards to compare.
_MAX_CHOICES = 64


@lru_cache(4096)
def choices(device: Device) -> tuple[tuple[int, ...], ...]:
    """Return the sets of some of the cards to consider for a model, by number, those with the most
    bandwidth first.

    They are every count of each kind of card, taking the cards with the most free memory. If there
    are too many, they are each kind's first card alone, and the fastest 2, 3, … cards.
    """
    if device.kind != "discrete" or len(device.cards) < 2:
        return ()
    slowest_gbps: dict[tuple[int, ...], float] = {}
    for chosen_cards in _choices_of(_kinds_of_cards(device)):
        if 0 < len(chosen_cards) < len(device.cards):
            numbers = tuple(sorted(card.number for card in chosen_cards))
            slowest_gbps[numbers] = min(map(_bandwidth, chosen_cards))
    ranked = sorted((-gbps, len(numbers), numbers) for numbers, gbps in slowest_gbps.items())
    return tuple(numbers for _, _, numbers in ranked)


def on_some_cards(
    device: Device, model: Model, variant: Variant, settings_wanted: RunSettings
) -> list[RunSettings]:
    """Return `settings_wanted` on each choice of some of the cards that have room for the weights,
    fastest first.

    A choice counts as fast as its slowest card. The speed of each kind of card alone is predicted,
    because the card with the most bandwidth may have slow kernels for this quant.
    """
    weights_bytes = variant.file_bytes - layer_bytes.disk_bytes(model, variant, USUAL)
    options = [settings_wanted.placed(cards=cards) for cards in choices(device)]
    options_with_room = [
        settings
        for settings in options
        if weights_bytes <= layer_bytes.with_used_cards(device, settings.placement).usable_bytes
    ]
    if len(options_with_room) < 2:
        return options_with_room
    tok_s: dict[int, float] = {}
    for same_kind in _kinds_of_cards(device):
        single_card = settings_wanted.placed(cards=(same_kind[0].number,))
        rate = speed.decode(device, model, variant, single_card).value
        tok_s.update({card.number: rate for card in same_kind})

    def slowest(settings: RunSettings) -> float:
        return min(tok_s[number] for number in settings.placement.cards)

    return sorted(options_with_room, key=slowest, reverse=True)


def _choices_of(groups: Sequence[Sequence[Device]]) -> Iterator[Sequence[Device]]:
    """Yield every count of each kind of card if those are few. Else yield each kind's first card,
    and the fastest 2, 3, … cards."""
    if math.prod(len(group) + 1 for group in groups) <= _MAX_CHOICES:
        for counts in itertools.product(*(range(len(group) + 1) for group in groups)):
            taken = (group[:n] for group, n in zip(groups, counts, strict=True))
            yield list(itertools.chain.from_iterable(taken))
        return
    for group in groups:
        yield group[:1]
    fastest_first = sorted(itertools.chain.from_iterable(groups), key=attrgetter("number"))
    fastest_first.sort(key=_bandwidth, reverse=True)
    for n in range(2, len(fastest_first) + 1):
        yield fastest_first[:n]


def _bandwidth(card: Device) -> float:
    return card.bandwidth_gbps.value


def _kinds_of_cards(device: Device) -> list[list[Device]]:
    """Return the cards of each kind, those with the most free memory first."""
    same_kind: dict[object, list[Device]] = {}
    freest_first = sorted(device.cards, key=attrgetter("number"))
    freest_first.sort(key=_available_bytes, reverse=True)
    for card in freest_first:
        kind = (card.match or card.name, card.memory.total_bytes, _bandwidth(card))
        same_kind.setdefault(kind, []).append(card)
    return list(same_kind.values())


def _available_bytes(card: Device) -> int:
    return card.memory.available_bytes


def best_split(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings,
    offload: OffloadOptions = FREE,
) -> RunSettings | None:
    """Return `settings` placed on `device` and its host for the fastest decoding. Returns None if
    no placement fits. The context counts as half full."""
    placements = _Search(
        layer_bytes.with_used_cards(device, settings.placement),
        model,
        variant,
        offload.applied_to(settings),
        offload,
    ).candidates()
    return fastest(device, model, variant, placements, depth=settings.n_ctx // 2)


def fastest(
    device: Device,
    model: Model,
    variant: Variant,
    options: Sequence[RunSettings],
    *,
    depth: int = 0,
) -> RunSettings | None:
    """Return the settings that are predicted to decode fastest; the first of them if several are
    equal."""
    if not options:
        return None
    if len(options) == 1:
        return options[0]
    rates = [speed.decode(device, model, variant, option, depth=depth).value for option in options]
    return options[rates.index(max(rates))]


class _Search:
    """The placements of one run that fit."""

    def __init__(
        self,
        device: Device,
        model: Model,
        variant: Variant,
        settings: RunSettings,
        offload: OffloadOptions,
    ) -> None:
        self._device = device
        self._model = model
        self._variant = variant
        self._offload = offload
        self._settings = settings
        self._ledger = memory.layer_ledger(model, variant, settings)
        self._limits = memory.cards_limits(device)
        full_need = memory.need(model, variant, settings, device)
        self._fixed_bytes = (
            full_need.compute_bytes
            + full_need.overhead_bytes
            + full_need.draft_bytes
            + full_need.projector_bytes
        )
        self._kv_share = (full_need.kv_bytes + full_need.recurrent_bytes) / max(
            1, full_need.total_bytes
        )

    def candidates(self) -> list[RunSettings]:
        """Return the placements that fit: the best with the KV cache on the cards, and the best
        with it in system memory. The second is tried only for a large cache."""
        start = self._settings.placement
        options = [self._with_fewest_on_host(start)]
        if self._kv_share > _MIN_KV_SHARE:
            options.append(self._with_fewest_on_host(replace(start, kv_on_host=True)))
        return [option for option in options if option is not None]

    def _with_fewest_on_host(self, start: Placement) -> RunSettings | None:
        """Return `start` with as few experts, else layers, in system memory as necessary. If
        `start` fits, it stays as it is. Returns None if it does not fit in any way."""
        placement = start
        if not self._fits(start):
            smaller_placement = self._with_experts_on_host(start) or self._with_layers_on_host(
                start
            )
            if smaller_placement is None:
                return None
            placement = smaller_placement
        split_settings = over_cards(
            self._device, self._model, self._variant, replace(self._settings, placement=placement)
        )
        need = memory.need(self._model, self._variant, split_settings, self._device)
        if verdict(self._device, need) == "no":
            return None
        return split_settings

    def _may_move_experts(self) -> bool:
        is_free = self._offload.experts_on_host is None
        return is_free and any(experts for _, experts, _, _ in self._ledger.layers)

    def _with_experts_on_host(self, start: Placement) -> Placement | None:
        """Return `start` with the experts of as few layers in system memory as necessary for the
        rest to fit."""
        if not self._may_move_experts():
            return None

        def without(n_layers: int) -> Placement:
            return replace(start, experts_on_host=n_layers)

        return self._first_that_fits(range(1, len(self._model.layers) + 1), without)

    def _with_layers_on_host(self, start: Placement) -> Placement | None:
        """Return `start` with as few layers in system memory as necessary for the rest to fit,
        after all experts."""
        if self._offload.gpu_layers is not None:
            return None
        if self._may_move_experts():
            start = replace(start, experts_on_host=-1)

        def with_layers(n_layers: int) -> Placement:
            return replace(start, gpu_layers=n_layers)

        return self._first_that_fits(range(len(self._model.layers) + 1, -1, -1), with_layers)

    def _first_that_fits(
        self, counts: range, placement_of: Callable[[int], Placement]
    ) -> Placement | None:
        """Return `placement_of` of the first count that fits, or None. Each count must need less on
        the cards than the one before."""

        def has_room(count: int) -> bool:
            return self._fits(placement_of(count))

        first_fit = bisect_left(counts, True, key=has_room)
        if first_fit < len(counts):
            return placement_of(counts[first_fit])
        return None

    def _fits(self, placement: Placement) -> bool:
        """Return whether the cards hold their part."""
        if self._settings.drafter.second is not None:
            # A drafter's layers leave the card with the model's.
            settings = replace(self._settings, placement=placement)
            settings = over_cards(self._device, self._model, self._variant, settings)
            need = memory.need(self._model, self._variant, settings, self._device)
            return verdict(self._device, need._replace(host_bytes=0)) != "no"
        if placement.gpu_layers == 0:
            return True
        if len(self._limits) == 1:
            on_card_bytes = sum(self._ledger.device_layers(placement))
            return on_card_bytes + self._fixed_bytes <= self._limits[0]
        device_layers = self._ledger.device_layers(placement)
        fixed_per_card = self._fixed_bytes // len(self._limits)
        if placement.tensor_split:
            card_bytes = layer_bytes.as_split(
                device_layers, placement.tensor_split, len(self._limits)
            )
        else:
            _, card_bytes = layer_bytes.over_cards(device_layers, self._limits)
        return all(
            n_bytes + fixed_per_card <= limit
            for n_bytes, limit in zip(card_bytes, self._limits, strict=True)
        )
