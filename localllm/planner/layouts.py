"""Whether a processor multiplies weights as they are stored or as the engine lays them out anew: by what was measured here.

llama.cpp lays out what it can when it loads a model: that takes a copy of the weights and, of an 8B model, ten seconds. A token
is then quicker (an eighth with AVX-512), but a prompt may be half as fast as with the weights as they lie, for which its newer
kernels are. (Qwen3-8B Q4_K_M on two Zen cores: 34.8 tok/s of prompt and 7.1 of answer as stored, 18.3 and 7.8 laid out.)
"""

from __future__ import annotations

from typing import Literal

from localllm.device.types import Device, MatrixRates
from localllm.planner import needs
from localllm.planner.types import Workload, backend_for
from localllm_catalog import quants
from localllm_catalog.types import Variant

_BLOCK = 256  # weights of Q4_K that lie together
# What is written after a prompt, beside what a model that thinks writes first: a screen of text, or of code.
_ANSWER_TOKENS = 300
# Formats of which most weights are of the type that was measured. The others are laid out, as llama.cpp would have it: those it
# has a layout for are quicker so in both, the rest is stored whatever is said.
_MEASURED = ("Q4_K_M", "Q4_K_S", "Q4_K")


def layout(device: Device, variant: Variant, workload: Workload) -> Literal["auto", "stored"]:
    """How `variant`'s weights are best held on `device` for that work; "auto" (the engine's own way) where nobody measured."""
    stored, laid_out = device.stored_rates, device.laid_out_rates
    if not depends(device, variant) or stored is None or laid_out is None:
        return "auto"
    need = needs.need_of(workload)
    new_tokens = need.prompt_tokens - need.cached_tokens

    def seconds(rates: MatrixRates) -> float:
        return new_tokens / rates.prompt_tflops.value + _ANSWER_TOKENS / rates.token_tflops.value

    return "stored" if seconds(stored) < seconds(laid_out) else "auto"


def token_gbps(rates: MatrixRates | None) -> float:
    """GB/s of Q4_K weights that one token's product reads and multiplies; 0 where nobody measured."""
    if rates is None:
        return 0.0
    return rates.token_tflops.value * 1e3 / 2 * float(quants.tensor_bytes("Q4_K", _BLOCK)) / _BLOCK


def depends(device: Device, variant: Variant) -> bool:
    """True where the kernels' rates decide how `variant`'s weights are held."""
    measured = variant.quant.upper().removeprefix("UD-") in _MEASURED
    return device.accelerator == "cpu" and backend_for(variant) == "llamacpp" and measured


def prompt_gain(device: Device) -> float:
    """How many times as fast as laid out anew matrices are multiplied as they are stored, for a prompt; 1 where it is unknown."""
    if device.stored_rates is None or device.laid_out_rates is None:
        return 1.0
    return device.stored_rates.prompt_tflops.value / device.laid_out_rates.prompt_tflops.value
