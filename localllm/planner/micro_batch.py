"""How many prompt tokens an accelerator computes in one piece: as many as pay, and as there is room for.

A micro-batch reads all weights once, and of a mixture of experts nearly all of those: the more tokens share that, the
faster a prompt is read, and the larger the buffers of a step are. A processor is bound by arithmetic long before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.device.types import Device
from localllm.planner import decode_cost, memory, prefill_cost
from localllm.planner.types import DEFAULT_BATCH, MemoryNeed, RunSettings, backend_of
from localllm_catalog.types import Model, Variant

SIZES = (DEFAULT_BATCH, 1024, 2048, 4096)
# A doubling that makes a prompt less than this faster is not worth its memory: it is less than the prediction is worth.
_PAYS = 1.05
# Share of what an accelerator may hold that larger steps may take of it, and of the context that one step may fill.
_SHARE_OF_MEMORY = 1 / 16
_SHARE_OF_CONTEXT = 1 / 4


def sizes(device: Device, model: Model, variant: Variant, settings: RunSettings, prompt_tokens: int) -> Sequence[int]:
    """Micro-batches larger than `settings` has that pay for a prompt of so many tokens on `device`, the largest first."""
    if device.accelerator == "cpu":
        return ()
    hardware = decode_cost.hardware_of(device, backend_of(variant).name)
    held = prefill_cost.prefill_terms(
        model, variant, hardware, prompt_tokens=prompt_tokens, n_batch=settings.n_batch
    ).total_s
    found: list[int] = []
    for size in SIZES:
        if size <= settings.n_batch:
            continue
        if size > min(prompt_tokens, settings.n_ctx * _SHARE_OF_CONTEXT):
            break
        each = prefill_cost.prefill_terms(model, variant, hardware, prompt_tokens=prompt_tokens, n_batch=size).total_s
        if held < each * _PAYS:
            break
        found.insert(0, size)
        held = each
    return found


def larger(
    device: Device, model: Model, variant: Variant, settings: RunSettings, need: MemoryNeed, prompt_tokens: int
) -> tuple[RunSettings, MemoryNeed]:
    """`settings` of a plan that fits with room to spare, and its `need`, with the largest micro-batch that pays and takes
    little; as they are where none does."""
    for size in sizes(device, model, variant, settings, prompt_tokens):
        tried = replace(settings, n_batch=size)
        taken = memory.need(model, variant, tried, device)
        if taken.total_bytes - need.total_bytes <= _SHARE_OF_MEMORY * need.limit_bytes:
            return tried, taken
    return settings, need
