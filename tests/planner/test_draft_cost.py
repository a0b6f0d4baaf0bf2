"""The cost of a drafted token: predictions with whole sources left out, and required results for
small models and for matrix units."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

import numpy as np

from benchmarks.planner_fit import drafts
from benchmarks.planner_fit.fit import Design, leave_out
from localllm.device.name_lookup import resolve
from localllm.planner import drafting
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import typical
from localllm.planner.types import Workload
from localllm_catalog import catalog

MODELS = catalog.load().by_id


def gain(machine: str, model: str, quant: str = "") -> float:
    files = [v for v in MODELS[model].variants if v.format == "gguf"]
    file = typical([v for v in files if not quant or v.quant == quant])
    device = resolve(machine)
    found = drafting.heads_gain(device, plan_for(device, MODELS[model], file, Workload()))
    assert found is not None
    return found.value


def test_drafting_gains_of_a_held_out_source_are_predicted_within_the_limit() -> None:
    errors = leave_out(Design(drafts.LAW, drafts.rows()), lambda row: row.source)
    off = np.abs(errors)
    assert len(errors) > 190
    assert np.median(off) < 0.10
    assert np.percentile(off, 90) < 0.30
    assert abs(np.median(errors)) < 0.05


def test_drafting_gains_of_mixtures_match_published_ones() -> None:
    lines = drafts.report(Design(drafts.LAW, drafts.rows()))
    mixtures = next(line for line in lines if line.startswith("| mixtures"))
    _, median, most, bias = (float(cell) for cell in mixtures.split("|")[2:6])
    assert median < 10
    assert most < 30
    assert abs(bias) < 5


@pytest.mark.parametrize("machine", ["RTX 5090", "RTX 3090", "Tesla P40"])
def test_a_small_model_gains_less_from_its_draft_heads(machine: str) -> None:
    """A guess for a small model takes the host as much time. On two P40, the gains of 4B, 9B and
    27B were 1.25, 1.37 and 1.92 (github.com/sudoingX/qwen38-mtp, pull request 29)."""
    gains = [gain(machine, f"qwen3.5-{size}") for size in ("4b", "9b", "27b")]
    assert gains == sorted(gains)


def test_a_file_with_more_bits_gains_more_from_drafting() -> None:
    """Each row costs the same arithmetic, but the step takes longer."""
    assert gain("Strix Halo 128GB", "qwen3.6-27b", "Q8_0") > 1.1 * gain(
        "Strix Halo 128GB", "qwen3.6-27b", "Q4_K_M"
    )


def test_macs_with_matrix_units_verify_drafts_faster() -> None:
    assert gain("M5 Pro 48GB", "qwen3.8-27b") > 1.5
    assert 1.0 <= gain("M3 Max 128GB", "qwen3.8-27b") < 1.25


@pytest.mark.parametrize(
    ("machine", "low", "high"),
    [("RTX 4090", 1.46, 2.07), ("RTX 3090 Ti", 1.4, 1.65), ("Tesla V100 32GB", 1.3, 1.5)],
)
def test_drafting_gains_of_large_cards_match_user_measurements(
    machine: str, low: float, high: float
) -> None:
    assert low < gain(machine, "qwen3.8-27b") < high
