"""Measurements of one model correct the prediction for the next: only the true cause changes. The
figures are from two real models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.device.name_lookup import resolve
from localllm.device.types import Device, Figure, Memory
from localllm.planner import calibration, speed, verify
from localllm.planner.calibration import Observation
from localllm.planner.speed import Measured
from localllm_catalog import catalog
from localllm_catalog.types import Model, Variant

CATALOG = catalog.load()
GIB = 2**30


def model(name: str) -> Model:
    found = CATALOG.get(name)
    assert found is not None
    return found


SMALL, GEMMA = model("smollm2-135m-instruct"), model("gemma-3-270m-it")
FILES = {
    SMALL.id: (SMALL, Variant("gguf", "Q4_1", "", (), 98_362_432)),
    GEMMA.id: (GEMMA, Variant("gguf", "Q4_K_M", "", (), 253_113_024)),
}
PAIRS = [(SMALL.id, GEMMA.id), (GEMMA.id, SMALL.id)]
# Two Zen 4 cores, llama.cpp 0.3.36, both models in turn step by step, 48 steps at each depth. The
# figures are the 10th percentile of milliseconds per token (the median is 3-8 % above; other
# programs ran). A copy of memory measured 27.7 GB/s.
DEPTHS = (29, 269, 525, 1037, 2061)
MILLISECONDS = {
    SMALL.id: (7.11, 8.47, 9.14, 10.32, 13.03),
    GEMMA.id: (11.43, 13.24, 13.48, 13.65, 14.64),
}


def cpu(bandwidth_gbps: float = 27.7) -> Device:
    pool = Memory(24 * GIB, 23 * GIB, 20 * GIB, "measured")
    return Device(
        "two cores",
        "system",
        "cpu",
        "server",
        pool,
        Figure(bandwidth_gbps, "measured"),
        n_cpu_cores=2,
    )


def bench(name: str, *, short: bool = True) -> Measured:
    """Return the record that `localllm bench` would have stored for these figures."""
    times = MILLISECONDS[name]
    run = Measured(*FILES[name], "llamacpp", 1e3 / times[2], DEPTHS[2])
    return replace(run, short_tok_s=1e3 / times[0], short_depth=DEPTHS[0]) if short else run


# --- recorded figures -----------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "other"), PAIRS)
@pytest.mark.parametrize("short", [True, False], ids=["two depths", "an older record"])
def test_each_model_predicts_the_other_within_15_percent_at_every_depth(
    known: str, other: str, short: bool
) -> None:
    for depth, milliseconds in zip(DEPTHS, MILLISECONDS[other], strict=True):
        found = speed.decode(
            cpu(), *FILES[other], depth=depth, measured=[bench(known, short=short)]
        )
        assert found.value == pytest.approx(1e3 / milliseconds, rel=0.15), depth
        assert found.low < 1e3 / milliseconds < found.high


def test_on_a_cpu_attention_accounts_for_the_growth_with_depth() -> None:
    # From 29 to 525 tokens both models became 2 ms slower. Reading 11 and 9 MB of cache takes only
    # 0.5 ms.
    for name, times in MILLISECONDS.items():
        at = [1 / speed.decode(cpu(), *FILES[name], depth=d).value for d in (DEPTHS[0], DEPTHS[2])]
        assert at[1] - at[0] == pytest.approx((times[2] - times[0]) / 1e3, rel=0.3)


def test_decode_speed_on_a_gpu_does_not_depend_on_cpu_cores() -> None:
    m = model("qwen3-8b")
    v = next(v for v in m.variants if v.quant == "Q4_K_M")
    device = resolve("RTX 4090")
    assert speed.decode(replace(device, n_cpu_cores=2), m, v, depth=8192) == speed.decode(
        device, m, v, depth=8192
    )


# --- a model's own figures ------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(FILES)), rate=st.floats(3, 400), depth=st.integers(0, 4000),
    other=st.floats(3, 400), gpu=st.booleans(),
)  # fmt: skip
def test_a_models_own_measurement_is_its_prediction_whatever_other_models_measured(
    name: str, rate: float, depth: int, other: float, gpu: bool
) -> None:
    device = resolve("RTX 4090") if gpu else cpu()
    m, v = FILES[name]
    neighbour = FILES[GEMMA.id if name == SMALL.id else SMALL.id]
    runs = [Measured(m, v, "llamacpp", rate, depth), Measured(*neighbour, "llamacpp", other, 512)]
    found = speed.decode(device, m, v, depth=depth, measured=runs)
    assert found.value == pytest.approx(rate, rel=1e-6)
    assert found.basis == "measured here: this model"


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_both_measured_depths_of_a_model_are_predicted_from_both_measurements(
    name: str, slower: float
) -> None:
    run = bench(name)
    run = replace(run, decode_tok_s=run.decode_tok_s / slower, short_tok_s=run.short_tok_s / slower)
    for depth, rate in run.decoded:
        assert speed.decode(
            cpu(), *FILES[name], depth=depth, measured=[run]
        ).value == pytest.approx(rate, rel=0.03)


def test_a_measurement_slower_at_small_depth_is_handled_as_noise() -> None:
    run = replace(bench(SMALL.id), short_tok_s=30.0)
    rates = [
        speed.decode(cpu(), *FILES[GEMMA.id], depth=d, measured=[run]).value for d in (0, 512, 4096)
    ]
    assert rates == sorted(rates, reverse=True)
    assert all(math.isfinite(r) and r > 0 for r in rates)


# --- causes ---------------------------------------------------------------------------------------

STEP = (5e-3, 3e-3, 2e-3)
EMPTY = (5e-3, 3e-3, 0.1e-3)
parts = st.tuples(*[st.floats(1e-5, 1e-1)] * 3)


def _seen(step: calibration.Parts, factors: calibration.Parts) -> Observation:
    return Observation(step, sum(p * f for p, f in zip(step, factors, strict=True)), 0.02)


def test_slowness_only_at_depth_changes_only_the_attention_factor() -> None:
    truth = (1.0, 1.0, 2.0)
    found = calibration.learn([_seen(EMPTY, truth), _seen(STEP, truth)], calibration.CPU)
    weights, layers, attention = (math.exp(x) for x in found.logs)
    assert attention > 1.6
    assert weights == pytest.approx(1, abs=0.12)
    assert layers == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("cause", [0, 1, 2])
def test_measurements_of_different_models_identify_the_slow_part(cause: int) -> None:
    truth = [1.0, 1.0, 1.0]
    truth[cause] = 1.8
    steps = [(9e-3, 1e-3, 1e-4), (1e-3, 9e-3, 1e-4), (4e-3, 4e-3, 8e-3)]
    found = calibration.learn(
        [_seen(s, (truth[0], truth[1], truth[2])) for s in steps], calibration.CPU
    )
    for i, log in enumerate(found.logs):
        assert math.exp(log) == pytest.approx(truth[i], rel=0.1)


@given(step=parts, slower=st.floats(0.4, 2.5))
def test_a_gpu_that_is_slower_is_slower_at_everything(
    step: calibration.Parts, slower: float
) -> None:
    found = calibration.learn(
        [Observation(step, sum(step) * slower, 0.02)], calibration.ACCELERATOR
    )
    for log in found.logs:
        assert log == pytest.approx(math.log(slower), abs=0.2 * abs(math.log(slower)) + 0.01)


@given(step=parts, other=parts, slower=st.floats(0.3, 3.0))
def test_a_measurement_reduces_uncertainty_and_none_leaves_predictions_unchanged(
    step: calibration.Parts, other: calibration.Parts, slower: float
) -> None:
    nothing = calibration.learn([], calibration.CPU)
    assert nothing.seconds(step) == pytest.approx(sum(step))
    assert calibration.learn([Observation(step, sum(step), 0.05)], calibration.CPU).seconds(
        other
    ) == pytest.approx(sum(other))
    seen = calibration.learn([Observation(step, sum(step) * slower, 0.05)], calibration.CPU)
    assert seen.seconds(step) == pytest.approx(sum(step) * slower, rel=0.05)
    assert seen.uncertainty(step) < nothing.uncertainty(step)


def test_a_shortfall_is_compared_at_both_depths() -> None:
    result = verify.compare(cpu(), bench(GEMMA.id), [bench(SMALL.id)])
    assert result.decode_short is not None
    assert result.decode_short[1] == pytest.approx(1e3 / 11.43)
    assert verify.compare(cpu(), bench(GEMMA.id, short=False)).decode_short is None
