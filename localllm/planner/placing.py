"""Which layers, experts and KV go to a card and which stay in system memory: what fits, and of that the fastest.

Of a mixture the routed experts are nearly all of the bytes and little of what a token reads, so they leave the card
first, layer by layer from the front, as few as must. Layers leave whole only where there are no experts to leave, or
where the rest alone is too large. The cache leaves where what that makes room for is worth more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner import memory, places, speed
from localllm.planner.types import MemoryNeed, RunSettings
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Variant

# Below this share of what a card must hold, moving the cache off it is not tried.
_MUCH_KV = 0.05


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """What somebody insists on; None = free. As in `Placement`."""

    gpu_layers: int | None = None
    experts_on_host: int | None = None
    tensor_split: tuple[float, ...] | None = None

    @property
    def is_free(self) -> bool:
        """True where layers and experts may go anywhere."""
        return self.gpu_layers is None and self.experts_on_host is None

    def over(self, settings: RunSettings) -> RunSettings:
        """`settings` with what is insisted on."""
        if self == FREE:
            return settings
        said = {
            "gpu_layers": self.gpu_layers,
            "experts_on_host": self.experts_on_host,
            "tensor_split": self.tensor_split,
        }
        return settings.placed(**{name: value for name, value in said.items() if value is not None})


FREE = OffloadOptions()


def fits(device: Device, need: MemoryNeed) -> bool:
    """True where every pool has room for its part: the accelerator's, each card's, the host's."""
    if need.total_bytes > device.memory.limit_bytes or not need.fits_every_card:
        return False
    return not (need.host_bytes and device.host is not None and need.host_bytes > device.host.limit_bytes)


def over_cards(device: Device, model: Model, variant: Variant, settings: RunSettings) -> RunSettings:
    """`settings` with the layers counted out to each of several cards; unchanged for one, or where that was said."""
    placed = settings.placement
    if device.n_gpus < 2 or device.kind != "discrete" or placed.tensor_split or placed.split_mode != "layer":
        return settings
    rows = memory.layer_ledger(model, variant, settings).device_layers(placed)
    counts, _ = places.over_cards(rows, memory.cards_limits(device))
    return settings.placed(tensor_split=tuple(float(n) for n in counts)) if rows else settings


def best_split(
    device: Device, model: Model, variant: Variant, settings: RunSettings, offload: OffloadOptions = FREE
) -> RunSettings | None:
    """`settings` placed over `device` and its host so that they fit and decode fastest with the context half full; None
    where nothing fits."""
    search = _Search(device, model, variant, offload.over(settings), offload)
    found = search.candidates()
    if len(found) < 2:
        return found[0] if found else None
    depth = settings.n_ctx // 2
    rates = [speed.decode(device, model, variant, s, depth=depth).value for s in found]
    return found[max(range(len(found)), key=lambda i: rates[i])]


class _Search:
    """The placements of one run that fit."""

    def __init__(
        self, device: Device, model: Model, variant: Variant, settings: RunSettings, offload: OffloadOptions
    ) -> None:
        self._device, self._model, self._variant, self._offload = device, model, variant, offload
        self._settings = settings
        self._book = memory.layer_ledger(model, variant, settings)
        self._limits = memory.cards_limits(device)
        whole = memory.need(model, variant, settings, device)
        self._beside_bytes = whole.compute_bytes + whole.overhead_bytes + whole.draft_bytes + whole.projector_bytes
        self._kv_share = (whole.kv_bytes + whole.recurrent_bytes) / max(1, whole.total_bytes)

    def candidates(self) -> list[RunSettings]:
        """The best of each way that fits."""
        start = self._settings.placement
        found = [self._fewest_off(start)]
        if self._kv_share > _MUCH_KV:
            found.append(self._fewest_off(replace(start, kv_on_host=True)))
        return [s for s in found if s is not None]

    def _fewest_off(self, start: Placement) -> RunSettings | None:
        """`start` with as few experts, else as few layers in system memory as makes the rest fit; as is, if that does."""
        n, offload = len(self._model.layers), self._offload
        placed: Placement | None = start
        if not self._room(start):
            experts = offload.experts_on_host is None and any(layer[1] for layer in self._book.layers)
            placed = self._least(1, n, lambda k: replace(start, experts_on_host=k)) if experts else None
            if placed is None and offload.gpu_layers is None:
                off = replace(start, experts_on_host=-1) if experts else start
                placed = self._least(0, n + 1, lambda k: replace(off, gpu_layers=n + 1 - k))
        if placed is None:
            return None
        settings = replace(self._settings, placement=placed)
        divided = over_cards(self._device, self._model, self._variant, settings)
        need = memory.need(self._model, self._variant, divided, self._device)
        return divided if fits(self._device, need) else None

    def _least(self, low: int, high: int, take: Callable[[int], Placement]) -> Placement | None:
        """`take(n)` for the least n from `low` to `high` that there is room for; None where not even for `high`."""
        if not self._room(take(high)):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._room(take(middle)) else (middle + 1, high)
        return take(low)

    def _room(self, placed: Placement) -> bool:
        """True where the cards hold their part."""
        if self._settings.drafter.second is not None:
            # A drafter's layers leave the card with the model's.
            settings = replace(self._settings, placement=placed)
            settings = over_cards(self._device, self._model, self._variant, settings)
            need = memory.need(self._model, self._variant, settings, self._device)
            return need.total_bytes <= self._device.memory.limit_bytes and need.fits_every_card
        if placed.gpu_layers == 0:
            return True
        if len(self._limits) == 1:
            return self._book.device_bytes(placed) + self._beside_bytes <= self._limits[0]
        rows = self._book.device_layers(placed)
        each = self._beside_bytes // len(self._limits)
        if placed.tensor_split:
            held = places.as_split(rows, placed.tensor_split, len(self._limits))
        else:
            _, held = places.over_cards(rows, self._limits)
        return all(b + each <= limit for b, limit in zip(held, self._limits, strict=True))
