"""Combine several cards into one Device, and select some of its cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from localllm.device.types import Device, Figure
from localllm.memory.account import Memory, with_released


def combined(cards: Sequence[Device]) -> Device:
    """Combine one-card Devices of one computer into one Device.

    Layers are divided over the cards, so their memory adds up. The other properties are those of
    the largest card. This function does not number the cards (see `numbered`).
    """
    if len(cards) == 1:
        return cards[0]
    largest = max(cards, key=attrgetter("memory.total_bytes", "bandwidth_gbps.value"))
    return replace(
        largest,
        name=_joined_names(cards),
        memory=_summed_memory([card.memory for card in cards]),
        bandwidth_gbps=_bandwidth_in_turn(cards),
        n_gpus=len(cards),
        cards=tuple(cards),
    )


def numbered(cards: Sequence[Device]) -> list[Device]:
    """Return `cards` numbered by their position."""
    return [replace(card, number=i) for i, card in enumerate(cards)]


@lru_cache(4096)
def only_cards(device: Device, numbers: tuple[int, ...]) -> Device:
    """Return `device` with only the cards of these numbers.

    Returns `device` itself if these are all its cards, or if it has no selectable cards.
    """
    chosen_cards = [card for card in device.cards if card.number in numbers]
    if not chosen_cards or len(chosen_cards) == len(device.cards):
        return device
    # The properties of the computer are recorded once, on the combined device.
    computer_fields = {
        "host": device.host,
        "host_bandwidth_gbps": device.host_bandwidth_gbps,
        "findings": device.findings,
    }
    return replace(combined(chosen_cards), simulated=device.simulated, **computer_fields)  # type: ignore[arg-type]


def with_released_bytes(device: Device, n_bytes: int) -> Device:
    """Return `device` as if `n_bytes` of the memory in use on its cards were free.

    Each card releases a part proportional to its memory in use.
    """
    others_bytes = device.memory.others_bytes
    if device.kind != "discrete" or n_bytes <= 0 or others_bytes <= 0:
        return device

    def released(memory: Memory) -> Memory:
        return with_released(memory, n_bytes * memory.others_bytes // others_bytes)

    return with_each_memory(device, released)


def with_share(device: Device, share: float) -> Device:
    """Return `device` as if a plan could take only `share` (0 to 1) of what it may take now.

    The share applies to each card alike.
    """

    def less(memory: Memory) -> Memory:
        capacity_bytes = memory.limit_bytes
        if device.kind == "discrete":
            capacity_bytes = memory.loadable_bytes
        return replace(memory, limit_bytes=int(share * capacity_bytes))

    return with_each_memory(device, less)


def with_each_memory(device: Device, change: Callable[[Memory], Memory]) -> Device:
    """Return `device` with `change` applied to the memory of each card, or to its only memory."""
    changed_cards = tuple(replace(card, memory=change(card.memory)) for card in device.cards)
    if changed_cards:
        memory = _summed_memory([card.memory for card in changed_cards])
    else:
        memory = change(device.memory)
    return replace(device, memory=memory, cards=changed_cards)


def _joined_names(cards: Sequence[Device]) -> str:
    names = []
    for name, count in Counter(card.name for card in cards).items():
        names.append(name if count == 1 else f"{count} × {name}")
    return " + ".join(names)


# Fields of several cards' memory that add up.
_SUMMED_FIELDS = (
    "total_bytes", "limit_bytes", "available_bytes", "system_bytes", "others_bytes",
    "carve_out_bytes",
)  # fmt: skip


def _summed_memory(memories: Sequence[Memory]) -> Memory:
    totals = {name: sum(getattr(memory, name) for memory in memories) for name in _SUMMED_FIELDS}
    return replace(memories[0], **totals)


def _bandwidth_in_turn(cards: Sequence[Device]) -> Figure:
    """Return the effective GB/s of cards that stream their shares of the weights in turn.

    Each card holds as many weights as its memory allows. The basis is "assumed" if any card's
    bandwidth is assumed.
    """
    figures = [card.bandwidth_gbps for card in cards]
    if len({(figure.value, figure.basis) for figure in figures}) == 1:
        return figures[0]
    seconds = sum(card.memory.total_bytes / card.bandwidth_gbps.value for card in cards)
    total = sum(card.memory.total_bytes for card in cards)
    source = "GPUs read in turn: total memory ÷ Σ(memory ÷ bandwidth)"
    if any(figure.basis == "assumed" for figure in figures):
        return Figure(round(total / seconds, 1), "assumed", source)
    return Figure(round(total / seconds, 1), "derived", source)
