"""The cost model of drafts on a GPU: seconds that one drafted token adds to a step, by cause.

t = row · 2 · parameters / lanes  +  guess_s

A drafted token is one more row of its sequence. The kernels for few rows multiply on the plain
lanes of the units, not on those for matrices. Each row costs the arithmetic of all weights again,
and the weights are read once. A guess of the model's own heads computes one layer and the output
matrix (`guess_share`). It also takes `guess_s` of the host, which launches it and samples from it.

A fixed share of a step is a worse law. It is too low for small models and for cards with much
bandwidth, and too high for slow memories. Coefficients: efficiency.json ("drafted"), fitted to
benchmarks/data/drafts.csv.
"""

from __future__ import annotations

from localllm.planner import efficiency, layer_bytes
from localllm.planner.bytes_per_token import streamed
from localllm.planner.decode_cost import CostTerm, Hardware
from localllm.planner.kernel_facts import facts
from localllm_catalog.types import Model, Variant


def draft_parts(model: Model, variant: Variant, hardware: Hardware) -> dict[str, CostTerm]:
    """Return the terms of one drafted token, without coefficients. benchmarks/planner_fit fits the
    coefficients."""
    read = streamed(model, variant)
    lanes = hardware.lane_tflops or hardware.tflops * facts(hardware.keys).row_speed
    flops = 2 * (read.dense_params + read.routed_params)
    return {
        "row": CostTerm(flops / (lanes * 1e12), (("row", 1),)),
        "guess": CostTerm(1.0, (("guess_s", 1),)),
    }


def draft_seconds(model: Model, variant: Variant, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of one more row ("row"), and those that the host takes for a guess
    ("guess")."""
    coefficients = efficiency.coefficients("drafted", hardware.keys)
    parts = draft_parts(model, variant, hardware)
    return {name: part.seconds(coefficients) for name, part in parts.items()}


def guess_share(model: Model, variant: Variant) -> float:
    """Return what a guess of the model's own heads reads, as a share of what a step reads: one
    layer and the output matrix."""
    read = streamed(model, variant).total_bytes
    output = layer_bytes.parts(model, variant).output_bytes
    return min(1.0, output / max(1, read) + 1 / len(model.layers))


def n_runs(hardware: Hardware) -> int:
    """Return the number of published runs on such machines (0: assumed)."""
    _, runs = efficiency.load()["drafted"].nearest(hardware.keys)
    return runs
