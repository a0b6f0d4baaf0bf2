"""The fit that gives efficiency.json: one unusual machine must not distort predictions for similar
ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numpy")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner_fit import ages, batched, fit, kinds, ranges, report
from benchmarks.planner_fit import rows as planner_rows
from benchmarks.planner_fit.rows import Row
from localllm.device.name_lookup import resolve
from localllm.planner import decode_cost, efficiency, prefill_cost
from localllm_catalog import catalog


def _rows(device: str, slowdown: float) -> list[Row]:
    """Return rows of four dense models on a simulated part whose true efficiency is 0.8 /
    slowdown."""
    keys = ("cuda", "nvidia-ada.cuda", f"part:{device}.cuda")
    return [
        Row(
            device, "cuda", f"model-{ms}", "Q8_0", False, 0, slowdown * ms / 0.8 / 1e3, keys,
            ((ms / 1e3, (("eta", -1),)), (0.0, (("eta", -1),))),
        )
        for ms in (2, 5, 10, 20)
    ]  # fmt: skip


def _unseen_error(monkeypatch: pytest.MonkeyPatch, freedom: float | None) -> float:
    monkeypatch.setitem(fit.PART_FREEDOM, "decode", freedom)
    seen = [row for i in range(3) for row in _rows(f"RTX 40{i}0", 1.0)] + _rows("RTX 4090", 3.0)
    design = fit.Design("decode", [*seen, _rows("RTX 4060", 1.0)[0]])
    return abs(float(fit.Fit(design, range(len(seen))).errors([len(seen)])[0]))


def test_an_outlier_affects_similar_machines_less_under_the_heavy_tailed_prior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three machines agree and one is three times slower. The prediction for a fourth machine of
    this kind follows the three."""
    shipped = fit.PART_FREEDOM["decode"]
    normal = _unseen_error(monkeypatch, None)
    robust = _unseen_error(monkeypatch, shipped)
    assert robust < 0.5 * normal
    assert robust < 0.08


def test_held_out_rows_do_not_affect_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device is predicted by a fit without its rows. A device three times slower than similar
    ones is predicted wrong by a factor of three."""
    rows = [row for i in range(3) for row in _rows(f"RTX 40{i}0", 1.0)] + _rows("RTX 4090", 3.0)
    errors = fit.leave_out(fit.Design("decode", rows), lambda r: r.device)
    assert all(abs(e) < 0.15 for e in errors[:12])
    assert all(e > 1.5 for e in errors[12:])


def test_rows_of_an_older_engine_do_not_lower_todays_predictions() -> None:
    """Half of the rows are from an engine that was 20 % slower. The prediction is for today's
    engine."""
    old = [
        replace(row, era="2023", seconds=row.seconds * 1.2)
        for i in range(3)
        for row in _rows(f"RTX 40{i}0", 1.0)
    ]
    new = [row for i in range(3) for row in _rows(f"RTX 41{i}0", 1.0)]
    design = fit.Design("decode", [*old, *new, *_rows("RTX 4200", 1.0)])
    errors = fit.Fit(design, range(len(old) + len(new))).errors(
        range(len(old) + len(new), len(design.data))
    )
    assert np.abs(errors).max() < 0.06


def test_slow_mixture_rows_of_older_cuda_do_not_lower_dense_predictions() -> None:
    """Until August 2025, mixtures took 1.6 times as long. Dense models are predicted by today's
    speed."""

    def prompts(era: str, moe: bool, slowdown: float) -> list[Row]:
        powers = (("matmul", -1), ("quant", 1))
        return [
            Row(
                f"RTX 40{n}0", "cuda", f"model-{ms}-{moe}", "Q8_0", moe, 0,
                slowdown * ms / 0.8 / 1e3,
                ("cuda", "nvidia-ada.cuda", f"part:rtx 40{n}0.cuda"),
                ((ms / 1e3, (*powers, ("moe", 1)) if moe else powers),), era=era,
            )
            for n in range(5, 9)
            for ms in (2, 5, 10)
        ]  # fmt: skip

    learnt = [
        *prompts("2026", False, 1.0),
        *prompts("2026", True, 1.5),
        *prompts("2025b", True, 1.5 * 1.6),
    ]
    design = fit.Design("prefill", [*learnt, *prompts("2025b", False, 1.0)])
    unseen = range(len(learnt), len(design.data))
    errors = fit.Fit(design, range(len(learnt))).errors(unseen)
    assert abs(float(np.median(errors))) < 0.2


def test_every_row_has_an_era_and_suspect_ones_are_known() -> None:
    rows = planner_rows.rows("decode")
    assert {row.era for row in rows} <= set(planner_rows.ERAS)
    assert len({row.era for row in rows}) == len(planner_rows.ERAS)
    assert any(row.suspect for row in rows)
    assert {r.device for r in rows if r.suspect} == {
        f"Apple {c}" for c in ("M2 Max", "M2 Ultra", "M5")
    }


def _age(device: str, engine: str, **what: object) -> ages.Age:
    plain = ages.Age(efficiency.hardware_keys(device, engine), "k", False, 4.0, "2025b", 0)
    return replace(plain, **what)  # type: ignore[arg-type]


def test_features_missing_in_an_era_slow_only_the_rows_that_need_them() -> None:
    """The missing features are dense tiles on AMD under Vulkan, the search for experts' tokens, K
    formats under ROCm, and unpacked heads on Volta."""
    part = decode_cost.CostTerm(1.0, ())
    prompt = {"matmul": part, "padding": part, "attention": part}

    def tokens(age: ages.Age) -> float:
        found = ages.prefill(age, prompt)
        assert found["padding"] == found["matmul"]
        assert found["attention"] == part
        return found["matmul"].value

    halo = "AMD Ryzen AI Max+ 395 (Strix Halo)"
    assert [tokens(_age(halo, "vulkan", quant=q)) for q in ("q4_0", "k", "q8")] == [
        1.36,
        1.50,
        1.76,
    ]
    assert tokens(_age(halo, "vulkan", era="2026")) == tokens(_age(halo, "rocm")) == 1.0
    assert tokens(_age("AMD Radeon RX 6800", "vulkan")) == 1.0
    assert tokens(_age(halo, "vulkan", moe=True, build=6111)) == 1.58
    assert (
        tokens(_age(halo, "vulkan", moe=True, build=6400))
        == tokens(_age(halo, "vulkan", moe=True))
        == 1.0
    )

    def step(age: ages.Age) -> tuple[float, float]:
        found = ages.decode(age, {"kv": part, "experts": part}, 8e9, 40e12)
        return found["kv"].value, found["older"].value

    assert step(_age(halo, "rocm")) == pytest.approx((1.0, 22.5 * 8e9 / 40e12))
    assert (
        step(_age(halo, "rocm", era="2026")) == step(_age(halo, "rocm", quant="q8")) == (1.0, 0.0)
    )
    assert step(_age("NVIDIA Tesla V100", "cuda")) == (4.0, 0.0)
    apart, fused = (step(_age("NVIDIA A100", "cuda", build=n))[1] for n in (6210, 7100))
    assert apart > fused == 0.0
    assert (
        step(_age("NVIDIA Tesla V100", "cuda", era="2026"))
        == step(_age("NVIDIA A100", "cuda"))
        == (1.0, 0.0)
    )


def test_the_cost_of_several_sequences_is_fitted_per_additional_sequence() -> None:
    """The rows follow the formula exactly: additional sequences run at a tenth of the nominal
    rate."""
    single = [row for i in range(3) for row in _rows(f"RTX 40{i}0", 1.0)]
    step_s, token_s = single[0].seconds, 1e-4
    many = [
        replace(single[0], batch=n, seconds=step_s + decode_cost.further_sequences(n) * token_s * 10,
                further=((decode_cost.further_sequences(n) * token_s, (("many", -1),)),))
        for n in (2, 4, 8, 16)
    ]  # fmt: skip
    design = fit.Design("decode", [*single, *many])
    law = batched.law_of(design, fit.Fit(design, range(len(single))))
    assert np.abs(fit.Fit(law).errors(range(len(many)))).max() < 0.05


def test_the_noise_is_estimated_from_repeated_rows_that_disagree() -> None:
    one = _rows("RTX 4090", 1.0)[0]
    rows = [one, replace(one, seconds=one.seconds * 1.1)]
    assert "Noise: 2 rows" in report.noise(rows)[0]
    assert report.noise(rows[:1]) == []


def test_rows_of_mlx_before_its_small_tiles_have_large_ones() -> None:
    part = decode_cost.CostTerm(1.0, ())

    def padding(device: str, build: int, tokens: float) -> float:
        age = _age(device, "mlx", moe=True, build=build, expert_tokens=tokens)
        return ages.prefill(age, {"padding": part, "matmul": part})["padding"].value

    assert padding("Apple M5 Max", 3200, 16) == 2.0
    assert padding("Apple M5 Max", 3200, 64) == padding("Apple M5 Max", 3201, 16) == 1.0
    assert padding("Apple M4 Max", 3200, 16) == 1.0
    rows = [row for row in planner_rows.rows("prefill") if row.engine == "mlx" and row.moe]
    rows = [row for row in rows if row.device == "Apple M5 Max" and "ax-engine" in row.source]
    of_512, of_2048 = ([row.parts[1][0] for row in rows if row.depth == n] for n in (256, 1024))
    assert len(of_512) == 4
    assert of_512 == pytest.approx([4 * seconds for seconds in of_2048], rel=0.01)


def test_a_measured_prompt_starts_empty_in_steps_no_longer_than_the_prompt() -> None:
    """mlx-lm's 512-token prompts start with an empty context. Their weights are read once per 512
    tokens, not per 2,048."""
    rows = planner_rows.rows("prefill")
    short = [r for r in rows if "john-rocky" in r.source and r.depth == 256]
    assert short
    for row in short:
        launches = next(value for value, powers in row.parts if powers[0] == ("layer_s", 1))
        assert launches == pytest.approx(row.n_layers / 512)


def test_no_row_that_counts_has_more_arithmetic_than_the_chip_can_do() -> None:
    """Apple GPUs before M5 multiply at most at their nominal rate. A row above this rate is wrong
    or has wrong units."""
    counted = [
        row
        for row in planner_rows.rows("prefill")
        if row.device.startswith(("Apple M1", "Apple M2", "Apple M3", "Apple M4"))
        and not row.suspect
    ]
    assert len(counted) > 60
    assert max(row.token_s / row.seconds for row in counted) < 1.0


def test_suspect_prefill_rows_do_not_make_decode_rows_of_the_same_runs_suspect() -> None:
    def runs(law: str) -> list[Row]:
        found = planner_rows.rows(law)
        return [
            row for row in found if row.engine == "rocm" and "strix-halo-testing/tree" in row.source
        ]

    assert runs("prefill")
    assert all(row.suspect for row in runs("prefill"))
    assert not any(row.suspect for row in runs("decode"))
    table = [
        row for row in planner_rows.rows("prefill") if row.source.endswith("llm-bench/README.md")
    ]
    assert len(table) == 6
    assert not any(row.suspect for row in table)
    assert all(doubt.why in report.INTRODUCTION for doubt in planner_rows.SUSPECTS)


def test_the_fit_uses_the_same_terms_as_the_prediction() -> None:
    """The sum of a row's parts with its machine's coefficients equals the seconds that are
    predicted."""
    hardware = decode_cost.hardware_of(resolve("DGX Spark"), "llamacpp")
    m = catalog.load().by_id["qwen3-30b-a3b"]
    v = next(v for v in m.variants if v.quant == "Q4_K_M")
    c = efficiency.coefficients("prefill", hardware.keys_for(v))
    parts = prefill_cost.prefill_parts(m, v, hardware, prompt_tokens=1024, depth=4096)
    terms = prefill_cost.prefill_terms(m, v, hardware, prompt_tokens=1024, depth=4096)
    assert sum(part.seconds(c) for part in parts.values()) == pytest.approx(terms.total_s)
    row = next(r for r in planner_rows.rows("prefill") if "dgx-spark.md" in r.source)
    assert {powers[0] for _, powers in row.parts} == {part.powers[0] for part in parts.values()}


def test_mlx_multiplies_on_the_matrix_units_of_m5_and_llamacpp_does_not() -> None:
    plain, _ = efficiency.part_tflops("M5 Max", 40, engine="metal")
    mlx, basis = efficiency.part_tflops("M5 Max", 40, engine="mlx")
    assert mlx == pytest.approx(4 * efficiency.part_tflops("M4 Max", 40)[0])
    assert mlx > 3 * plain
    assert basis == "derived"
    assert efficiency.part_tflops("M4 Max", 40, engine="mlx") == efficiency.part_tflops(
        "M4 Max", 40
    )


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.01, 1.0)), min_size=15, max_size=120)
)
def test_every_stratums_range_holds_four_in_five_held_out_errors(
    drawn: list[tuple[str, float]],
) -> None:
    """For any errors, a stratum of at least 15 rows contains 76 to 84 % of them. A stratum with
    fewer rows passes them on to the next wider one."""
    found = [
        ranges.Miss(error, f"source {n % 3}", (f"{name} short", name, "all"))
        for n, (name, error) in enumerate(drawn)
    ]
    kept = ranges.strata(found)
    assert sum(len(s.off) for s in kept) >= len(found)
    for stratum in kept:
        if len(stratum.off) >= ranges.FEWEST:
            assert stratum.width <= 1.3 * stratum.holding or stratum.inside <= 0.84
            assert stratum.inside >= 0.76 or len(set(stratum.off)) < len(stratum.off)


def test_errors_are_reported_by_kind_of_device_and_model() -> None:
    """Each recent row is in one group of every table, and a group's share counts only its own
    rows."""
    data = [row for row in planner_rows.rows("decode") if "kyuz0" in row.source][:12]
    data += [row for row in planner_rows.rows("decode") if "apple-m4-pro" in row.source][:12]
    off = np.array([0.01] * 12 + [3.0] * 12)
    lines = kinds.report("decode", data, off, {"seen": 0.1, "MoE": 0.1, "dense": 0.1})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    by_kind = {row[0]: row for row in cells}
    assert by_kind["Mac, metal"][1:4] == ["12", "1", "300.0"]
    assert by_kind["Mac, metal"][-1] == "0"
    halo = [row for name, row in by_kind.items() if name.startswith("Strix Halo")]
    assert sum(int(row[1]) for row in halo) == 12
    assert {row[3] for row in halo} == {"1.0"}
    models = [name for name in by_kind if name.startswith(("MoE", "dense"))]
    assert sum(int(by_kind[name][1]) for name in models) == 24


def test_a_source_with_many_rows_does_not_determine_the_range_alone() -> None:
    many = [ranges.Miss(0.01, "one", ("all",)) for _ in range(64)]
    others = [ranges.Miss(0.3, f"other {n}", ("all",)) for n in range(16)]
    assert ranges.quantile(many, 0.8) == pytest.approx(0.01)
    assert ranges.quantile([*many, *others], 0.8) == pytest.approx(0.3)
    (stratum,) = ranges.strata([*many, *others])
    assert stratum.width == pytest.approx(0.3)
