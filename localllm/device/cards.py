"""Several cards as one Device: their memory in sum, what a token meets on its way, and any choice
of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from localllm.device.types import Device, Figure
from localllm.memory.account import Memory, with_released


def together(cards: Sequence[Device]) -> Device:
    """One-card Devices of one computer as one: layers are divided over them, so memory adds up;
    what else is said of it is the largest card's. A card is numbered by its place unless it is
    numbered already."""
    if len(cards) == 1:
        return cards[0]
    biggest = max(cards, key=attrgetter("memory.total_bytes", "bandwidth_gbps.value"))
    return replace(
        biggest,
        name=_joined(cards),
        memory=_sum([card.memory for card in cards]),
        bandwidth_gbps=_in_turn(cards),
        n_gpus=len(cards),
        cards=tuple(cards),
    )


def numbered(cards: Sequence[Device]) -> list[Device]:
    """`cards` with their places as their numbers."""
    return [replace(card, number=i) for i, card in enumerate(cards)]


@lru_cache(4096)
def only(device: Device, numbers: tuple[int, ...]) -> Device:
    """`device` had it only the cards of these numbers; itself where that is all, or it has no cards
    that can be chosen of."""
    chosen = [card for card in device.cards if card.number in numbers]
    if not chosen or len(chosen) == len(device.cards):
        return device
    # What the machine around them is, is said once, of the whole.
    around = {
        "host": device.host,
        "host_bandwidth_gbps": device.host_bandwidth_gbps,
        "findings": device.findings,
    }
    return replace(together(chosen), simulated=device.simulated, **around)  # type: ignore[arg-type]


def with_released_bytes(device: Device, n_bytes: int) -> Device:
    """`device` when `n_bytes` of its cards that are taken now were free: of each card's as its part
    of what is taken."""
    taken = device.memory.others_bytes
    if device.kind != "discrete" or n_bytes <= 0 or taken <= 0:
        return device

    def released(memory: Memory) -> Memory:
        return with_released(memory, n_bytes * memory.others_bytes // taken)

    return with_each(device, released)


def with_share(device: Device, share: float) -> Device:
    """`device` when of what a plan may take of it now only `share` (0 to 1) could be had, of each
    card alike."""

    def less(memory: Memory) -> Memory:
        room = memory.limit_bytes
        if device.kind == "discrete":
            room = memory.loadable_bytes
        return replace(memory, limit_bytes=int(share * room))

    return with_each(device, less)


def with_each(device: Device, changed: Callable[[Memory], Memory]) -> Device:
    """`device` with the memory of each of its cards, or its one, `changed`."""
    each = tuple(replace(card, memory=changed(card.memory)) for card in device.cards)
    if each:
        memory = _sum([card.memory for card in each])
    else:
        memory = changed(device.memory)
    return replace(device, memory=memory, cards=each)


def _joined(cards: Sequence[Device]) -> str:
    names = []
    for name, count in Counter(card.name for card in cards).items():
        names.append(name if count == 1 else f"{count} × {name}")
    return " + ".join(names)


# What of several cards' memory adds up.
_ADD_UP = (
    "total_bytes", "limit_bytes", "available_bytes", "system_bytes", "others_bytes",
    "carve_out_bytes",
)  # fmt: skip


def _sum(memories: Sequence[Memory]) -> Memory:
    total = {name: sum(getattr(memory, name) for memory in memories) for name in _ADD_UP}
    return replace(memories[0], **total)


def _in_turn(cards: Sequence[Device]) -> Figure:
    """GB/s where each card streams its share of the weights in turn and holds as much as its memory
    lets it; assumed where one's is."""
    figures = [card.bandwidth_gbps for card in cards]
    if len({(figure.value, figure.basis) for figure in figures}) == 1:
        return figures[0]
    seconds = sum(card.memory.total_bytes / card.bandwidth_gbps.value for card in cards)
    total = sum(card.memory.total_bytes for card in cards)
    source = "GPUs read in turn: total memory ÷ Σ(memory ÷ bandwidth)"
    if any(figure.basis == "assumed" for figure in figures):
        return Figure(round(total / seconds, 1), "assumed", source)
    return Figure(round(total / seconds, 1), "derived", source)
