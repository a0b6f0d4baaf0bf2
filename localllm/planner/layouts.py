"""Whether a processor multiplies weights as they are stored or as the engine lays them out anew: by what was measured here.

llama.cpp lays out what it can when it loads a model: that takes a copy of the weights and, of an 8B model, ten seconds. A token
is then quicker (an eighth with AVX-512), but a prompt may be half as fast as with the weights as they lie, for which its newer
kernels are. (Qwen3-8B Q4_K_M on two Zen cores: 34.8 tok/s of prompt and 7.1 of answer as stored, 18.3 and 7.8 laid out.)
"""

from __future__ import annotations

from typing import Literal

from localllm.device.types import Device
from localllm.planner import needs, timed
from localllm.planner.types import Workload, backend_for
from localllm_catalog.types import Model, Variant

# What is written after a prompt, beside what a model that thinks writes first: a screen of text, or of code.
_ANSWER_TOKENS = 300
# A file of less is loaded, and answers, before its kernels are timed.
_WORTH_TIMING_BYTES = 128 * 2**20


def layout(device: Device, model: Model, variant: Variant, workload: Workload) -> Literal["auto", "stored"]:
    """How `variant`'s weights are best held on `device` for that work; "auto" (the engine's own way) where nobody measured, and
    where it lays nothing out."""
    base = timed.base_type(variant)
    if not _on_the_processor(device, variant) or not any(r.laid_out for r in device.matrix_rates if r.type == base):
        return "auto"
    stored, usual = (timed.flops_s(device.matrix_rates, model, variant, stored=s) for s in (True, False))
    if stored is None or usual is None:
        return "auto"
    need = needs.need_of(workload)
    new_tokens = need.prompt_tokens - need.cached_tokens

    def work(flops_s: tuple[float, float]) -> float:
        prompt, token = flops_s
        return new_tokens / prompt + _ANSWER_TOKENS / token

    return "stored" if work(stored) < work(usual) else "auto"


def types_to_time(device: Device, variant: Variant) -> list[str]:
    """The types whose kernels are worth timing before `variant` is planned on `device`: they decide how its weights are held and
    how fast it is said to be."""
    heavy = (variant.weights_bytes or variant.file_bytes) >= _WORTH_TIMING_BYTES
    return timed.types_needed(variant) if heavy and _on_the_processor(device, variant) else []


def _on_the_processor(device: Device, variant: Variant) -> bool:
    return device.accelerator == "cpu" and backend_for(variant) == "llamacpp"
