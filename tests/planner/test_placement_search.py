"""Models split between cards and system memory: exact bytes for each place, as few experts as
possible in system memory, and speeds that agree with published runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.device import parts_table
from localllm.device.name_lookup import resolve
from localllm.device.types import Device, Figure
from localllm.planner import explain, kv_sizes, layer_bytes, memory, placement_search, speed
from localllm.planner.placement_search import OffloadOptions
from localllm.planner.plan import max_context, plan_for
from localllm.planner.serialise import plan_to_json
from localllm.planner.speed import Measured
from localllm.planner.starting_settings import Overrides, typical
from localllm.planner.types import USUAL, RunSettings, Workload
from localllm_backends.placement import Placement
from localllm_catalog import catalog, from_gguf, gguf
from localllm_catalog.types import Model, Variant
from models import tiny_gguf
from support.examples import examples

CATALOG = catalog.load()
MIXTURE, DENSE = "gpt-oss-120b", "llama-3.3-70b-instruct"


def model(name: str) -> Model:
    found = CATALOG.get(name)
    assert found is not None
    return found


def variant(m: Model, quant: str = "") -> Variant:
    return next(v for v in m.variants if v.format == "gguf" and quant in ("", v.quant))


# --- where it goes --------------------------------------------------------------------------------


def test_for_a_mixture_larger_than_the_card_only_experts_are_in_system_memory() -> None:
    device, m = resolve("RTX 4090 + 64GB RAM"), model(MIXTURE)
    plan = plan_for(device, m, variant(m), Workload())
    placed = plan.settings.placement
    assert plan.fits == "split"
    assert (placed.gpu_layers, placed.kv_on_host) == (-1, False)
    assert 0 < placed.experts_on_host < len(m.layers)
    assert plan.memory.kv_bytes == kv_sizes.kv_bytes(m, plan.settings)
    # Moving whole layers would be far slower: attention would read from system memory too.
    layers = placement_search.best_split(
        device,
        m,
        variant(m),
        plan.settings.placed(experts_on_host=0),
        OffloadOptions(experts_on_host=0),
    )
    assert layers is not None
    assert 0 < layers.placement.gpu_layers < len(m.layers)
    assert plan.decode_tok_s.value > 1.3 * speed.decode(device, m, variant(m), layers).value


@pytest.mark.parametrize(
    ("machine", "weights"),
    [
        ("RTX 4090 + 64GB RAM", "read"),
        ("Arc B580 + 128GB RAM", "auto"),
        ("RTX PRO 6000 + 64GB RAM", "auto"),
    ],
)
def test_weights_in_system_memory_are_pinned_with_cuda(machine: str, weights: str) -> None:
    device, m = resolve(machine), model(MIXTURE)
    plan = plan_for(device, m, variant(m), Workload())
    assert plan.settings.placement.weights == weights
    assert plan.fits == ("yes" if "PRO" in machine else "split")


def test_weights_are_left_mapped_if_system_memory_is_not_free() -> None:
    device, m = resolve("RTX 4090 + 64GB RAM"), model(MIXTURE)
    assert device.host is not None
    busy = replace(device, host=replace(device.host, available_bytes=20 * 10**9))
    plan = plan_for(busy, m, variant(m), Workload())
    assert (plan.fits, plan.settings.placement.weights) == ("split", "auto")


def test_for_a_dense_model_larger_than_the_card_complete_layers_are_in_system_memory() -> None:
    device, m = resolve("RTX 4090 + 64GB RAM"), model(DENSE)
    plan = plan_for(device, m, variant(m, "Q4_K_M"), Workload())
    placed = plan.settings.placement
    assert plan.fits == "split"
    assert 0 < placed.gpu_layers <= len(m.layers)
    assert placed.experts_on_host == 0
    assert (
        plan.memory.weights_bytes + plan.memory.host_bytes >= 0.99 * variant(m, "Q4_K_M").file_bytes
    )


def test_a_model_that_fits_in_neither_memory_is_refused_with_both_sizes() -> None:
    device, m = resolve("rtx 3060 12GB + 16GB RAM"), model(DENSE)
    plan = plan_for(device, m, variant(m, "Q4_K_M"), Workload())
    assert plan.fits == "no"
    from localllm.planner import explanations

    said = explanations.does_not_fit_text(plan, device)
    assert "11.8 GB and 14.2 GB of system memory usable" in said


@pytest.mark.parametrize(
    "name", ["RTX 3090 x2 + 64GB RAM", "RTX 3090 + RTX 3060 12GB + 64GB RAM", "4x RTX 3090"]
)
def test_no_card_of_several_gets_more_than_its_memory(name: str) -> None:
    device = resolve(name)
    for m in (model(MIXTURE), model(DENSE), model("qwen3-32b")):
        plan = plan_for(device, m, variant(m), Workload())
        if plan.fits == "no":
            continue
        need, n_used = plan.memory, len(plan.settings.placement.cards) or device.n_gpus
        assert need.total_bytes <= need.limit_bytes
        if n_used == 1:
            continue
        assert len(need.cards_bytes) == n_used
        assert sum(need.cards_bytes) == pytest.approx(need.total_bytes, abs=device.n_gpus)
        counts = plan.settings.placement.tensor_split
        n_device = len(m.layers) + 1 - plan.settings.placement.first_gpu_layer(len(m.layers))
        assert sum(counts) == n_device


def test_the_faster_of_two_cards_that_are_needed_is_filled_first() -> None:
    device, m = resolve("RTX 3090 + RTX 3060 12GB"), model(DENSE)
    plan = plan_for(device, m, variant(m, "Q2_K"), Workload())
    large, small = plan.memory.cards_bytes
    assert plan.fits in ("yes", "tight")
    assert plan.settings.placement.cards == ()
    assert large > 0.85 * device.cards[0].memory.limit_bytes
    by_memory = replace(
        plan.settings, placement=replace(plan.settings.placement, tensor_split=(2.0, 1.0))
    )
    assert (
        plan.decode_tok_s.value
        > 1.05 * speed.decode(device, m, variant(m, "Q2_K"), by_memory).value
    )
    assert small / large < 12 / 24


# --- which cards ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "name", "cards"),
    [
        # one card holds it, and the second is the faster
        ("RTX 3090 + RTX 4090", "qwen3-32b", (1,)),
        ("RTX 3060 12GB + RTX 3090 + RTX 3060 12GB", "qwen3-32b", (1,)),
        ("4x RTX 3090", DENSE, (0, 1)),  # no more cards than are needed
        ("Tesla P40 + 2x RTX 3090", DENSE, (1, 2)),  # the slow card is left out
        ("RTX 3090 + RTX 4090", DENSE, ()),  # both cards are needed
    ],
)
def test_the_cards_that_answer_fastest_are_used(
    machine: str, name: str, cards: tuple[int, ...]
) -> None:
    device, m = resolve(machine), model(name)
    plan = plan_for(device, m, variant(m, "Q4_K_M"), Workload())
    assert plan.fits in ("yes", "tight")
    assert plan.settings.placement.cards == cards
    said = "\n".join(explain.explain(plan, device, columns=200))
    for card in device.cards:
        assert (f"GPU {card.number} " in said) == (not cards or card.number in cards), said


def test_a_card_whose_kernels_are_slow_for_a_quant_is_not_used() -> None:
    """The TITAN Xp has more than twice the bandwidth, but computes 1-bit weights at 6 tokens/s."""
    device, m = resolve("RTX 2000 Ada Generation + TITAN Xp"), model("bonsai-27b")
    assert device.cards[1].bandwidth_gbps.value > 2 * device.cards[0].bandwidth_gbps.value
    plan = plan_for(device, m, variant(m, "Q1_0"), Workload())
    assert plan.settings.placement.cards == (0,)
    assert plan.decode_tok_s.value > 30


def test_a_card_filled_by_other_programs_is_not_chosen_first() -> None:
    device, m = resolve("RTX 4090 + RTX 3090"), model("qwen3-32b")
    fast = replace(device.cards[0].memory, available_bytes=2 * 10**9)
    busy = replace(device, cards=(replace(device.cards[0], memory=fast), device.cards[1]))
    assert plan_for(busy, m, variant(m, "Q4_K_M"), Workload()).settings.placement.cards == (1,)


def test_the_longest_context_is_computed_with_all_cards() -> None:
    device, m = resolve("2x RTX 3090"), model("qwen3-32b")
    plan = plan_for(device, m, variant(m, "Q4_K_M"), Workload())
    one = resolve("RTX 3090")
    alone = plan_for(one, m, variant(m, "Q4_K_M"), Workload())
    assert len(plan.settings.placement.cards) == 1
    assert max_context(device, plan) > max_context(one, alone)


CARDS = sorted(
    {
        r.name
        for r in parts_table.rows()
        if r.kind == "discrete" and r.accelerator == "cuda" and r.memory_gb
    }
)
SOME = [m for m in CATALOG.models if any(v.format == "gguf" for v in m.variants)]
# By name, because the text of a model is too large for an example of Hypothesis.
FILES = [(m.id, v.quant) for m in SOME for v in m.variants if v.format == "gguf"]
HOSTS = ["", " + 64GB DDR5"]


@settings(max_examples=examples(120))
@given(
    st.sampled_from(CARDS), st.sampled_from(CARDS), st.sampled_from(FILES), st.sampled_from(HOSTS)
)
def test_two_cards_are_never_slower_than_one_that_holds_the_model(
    a: str, b: str, file: tuple[str, str], host: str
) -> None:
    """System memory, if any, helps one card as much as two."""
    m = model(file[0])
    v = variant(m, file[1])
    both = plan_for(resolve(f"{a} + {b}{host}"), m, v, Workload())
    for name in (a, b):
        alone = plan_for(resolve(f"{name}{host}"), m, v, Workload())
        if alone.fits != "no":
            assert both.fits != "no"
            assert both.decode_tok_s.value >= alone.decode_tok_s.value


@pytest.mark.parametrize("card", CARDS[::5])
def test_data_in_slower_memory_makes_no_answer_faster(card: str) -> None:
    """Recurrent states and additional sequences count, whether a model is split or not."""
    device = resolve(f"{card} + 64GB DDR5")
    for m in [m for m in SOME if m.experts is not None][::3]:
        v = typical([v for v in m.variants if v.format == "gguf"])
        for n in (1, 8):
            runs = [USUAL.placed(experts_on_host=left) for left in (0, 1, 4)]
            rates = [speed.decode(device, m, v, run, n_sequences=n).value for run in runs]
            assert rates == sorted(rates, reverse=True), (m.id, n, rates)


def test_explicit_offload_options_are_followed() -> None:
    device, m = resolve("RTX 4090 + 128GB RAM"), model(MIXTURE)
    v = variant(m)
    for options in (
        OffloadOptions(experts_on_host=30),
        OffloadOptions(experts_on_host=-1),
        OffloadOptions(gpu_layers=10),
        OffloadOptions(gpu_layers=0),
    ):
        placed = plan_for(
            device, m, v, Workload(), overrides=Overrides(offload=options)
        ).settings.placement
        assert options.experts_on_host in (None, placed.experts_on_host)
        assert options.gpu_layers in (None, placed.gpu_layers)
    all_there = plan_for(
        device,
        m,
        v,
        Workload(),
        overrides=Overrides(offload=OffloadOptions(gpu_layers=-1, experts_on_host=0)),
    )
    assert all_there.fits == "no"


def test_a_longer_context_moves_experts_to_system_memory() -> None:
    device, m = resolve("RTX 4090 + 64GB RAM"), model(MIXTURE)
    short, long = (plan_for(device, m, variant(m), Workload(context=c)) for c in (8192, 131072))
    kept = [p.settings.placement.host_expert_layers(len(m.layers)) for p in (short, long)]
    assert kept[0] < kept[1]
    assert max_context(device, short) >= short.settings.n_ctx


def test_vram_headroom_moves_experts_to_system_memory_and_the_host_is_counted() -> None:
    plain = resolve("RTX 4090 + 64GB RAM")
    from localllm.device.overrides import with_memory

    left = with_memory(plain, vram_headroom_gb=4)
    assert left.memory.limit_bytes == plain.memory.limit_bytes - 4_000_000_000
    m = model(MIXTURE)
    kept = [
        plan_for(d, m, variant(m), Workload()).settings.placement.experts_on_host
        for d in (plain, left)
    ]
    assert kept[0] < kept[1]


def test_the_plan_lists_the_parts_in_each_memory() -> None:
    device, m = resolve("RTX 4090 + 64GB RAM"), model(MIXTURE)
    plan = plan_for(device, m, variant(m), Workload())
    kept = plan.settings.placement.experts_on_host
    text = "\n".join(explain.explain(plan, device, columns=200))
    assert f"experts of {kept} of {len(m.layers)} layers run from system memory" in text
    assert "51 GB/s (assumed: two channels of DDR4-3200)" in text
    assert plan_to_json(plan)["placement"] == {
        "gpu_layers": -1, "experts_on_host": kept, "cards": [], "tensor_split": [],
        "kv_on_host": False, "tables": "auto", "layout": "auto",
    }  # fmt: skip


# --- bytes ----------------------------------------------------------------------------------------


@given(
    st.sampled_from([MIXTURE, DENSE, "qwen3-8b", "glm-4.7-flash", "gemma-3-27b-it"]),
    st.integers(-1, 90),
    st.integers(-1, 90),
    st.booleans(),
)
@settings(max_examples=examples(60))
def test_every_byte_is_counted_exactly_once(
    name: str, gpu_layers: int, experts: int, kv_on_host: bool
) -> None:
    m = model(name)
    v = variant(m)
    run = RunSettings(8192, placement=Placement(gpu_layers, experts, kv_on_host=kv_on_host))
    book = memory.layer_ledger(m, v, run)
    placed = run.placement
    on_device, host = book.device_layers(placed), book.host_weights_bytes(placed)
    host_kv, host_state = book.host_kv_bytes(placed)
    kv = sum(kv_sizes.layer_kv_bytes(m, run))
    # A tied model's output matrix is a second copy of one of the tables.
    copied = (
        book.output_bytes - book.own_output_bytes
        if placed.first_gpu_layer(len(m.layers)) <= len(m.layers)
        else 0
    )
    total = memory.weights_bytes(v) + kv + sum(kv_sizes.layer_state_bytes(m, run)) + copied
    assert sum(on_device) + host + host_kv + host_state == total
    assert kv == pytest.approx(kv_sizes.kv_bytes(m, run), abs=len(m.layers))
    share = layer_bytes.shares(m, v, placed)
    assert all(-1e-9 <= x <= 1 + 1e-9 for x in (share.dense, share.experts, share.kv, share.layers))


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=120),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=6),
)
@settings(max_examples=examples(100))
def test_a_gpu_layer_count_has_the_meaning_of_llama_cpp(
    layers: list[int], limits: list[int]
) -> None:
    counts, held = layer_bytes.over_cards(layers, limits)
    assert sum(counts) == len(layers)
    assert sum(held) == sum(layers)
    if len(layers) > len(limits):
        assert layer_bytes.as_split(layers, counts, len(limits)) == held


@given(st.integers(1, 80), st.integers(0, 81))
def test_more_on_the_host_is_never_more_on_the_card(low: int, gpu_layers: int) -> None:
    m = model(DENSE)
    book = memory.layer_ledger(m, variant(m), RunSettings(4096))
    fewer, more = (Placement(gpu_layers=n) for n in (min(low, gpu_layers), max(low, gpu_layers)))
    assert sum(book.device_layers(fewer)) <= sum(book.device_layers(more))


@pytest.mark.parametrize(
    "write", [tiny_gguf.write_moe, tiny_gguf.write_sliding, tiny_gguf.write_hybrid]
)
def test_the_size_of_every_layer_is_read_from_the_header(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    header = gguf.read(write(tmp_path / "model.gguf"))
    m = from_gguf.model_from_gguf(header)
    found = layer_bytes.parts(m, m.variants[0])
    of_layer = [
        [t.n_bytes for t in header.tensors if t.name.startswith(f"blk.{i}.")] for i in range(len(m.layers))
    ]  # fmt: skip
    assert [dense + experts for dense, experts in found.layers] == [
        sum(sizes) for sizes in of_layer
    ]
    assert found.input_bytes == next(
        t.n_bytes for t in header.tensors if t.name == "token_embd.weight"
    )
    stored = found.input_bytes + found.own_output_bytes + found.dense_bytes + found.expert_bytes
    assert stored == m.variants[0].weights_bytes
    assert found.output_bytes - found.own_output_bytes == (
        found.input_bytes if m.tied_embeddings else 0
    )
    assert (found.expert_bytes > 0) == (m.experts is not None)


# --- speed ----------------------------------------------------------------------------------------

_I9 = "RTX 2080 + 64GB RAM"  # with an i9-10900X, whose four channels of DDR4-3200 reach 102 GB/s
_LLMFIT = "https://github.com/AlexsJones/llmfit/pull/"
# (machine, GB/s of its memory, model, settings, tok/s, source)
PUBLISHED = [
    (_I9, 102.4, "qwen3-30b-a3b", Placement(experts_on_host=36), 36.7, _LLMFIT + "755"),
    (_I9, 102.4, "gemma-3-12b-it", Placement(gpu_layers=44), 26.1, _LLMFIT + "774"),
    (_I9, 102.4, "qwen3-14b", Placement(gpu_layers=32), 16.9, _LLMFIT + "774"),
    (_I9, 102.4, "phi-4", Placement(gpu_layers=32), 16.7, _LLMFIT + "774"),
    ("RX 6900 XT + 64GB DDR5-5600", 0, MIXTURE, Placement(experts_on_host=28), 19.0,
     "https://www.reddit.com/r/LocalLLaMA/comments/1ofxt6s"),
    ("RTX 4090 + 96GB DDR5-5600", 0, MIXTURE, Placement(experts_on_host=36), 25.6,
     "https://github.com/ggml-org/llama.cpp/pull/15157, by a user; the card is not said, 8 GB of it are used"),
]  # fmt: skip


def machine(name: str, gbps: float) -> Device:
    device = resolve(name)
    return replace(device, host_bandwidth_gbps=Figure(gbps, "given")) if gbps else device


@pytest.mark.parametrize(("name", "gbps", "model_id", "placed", "tok_s", "source"), PUBLISHED)
def test_published_runs_are_inside_the_stated_range(
    name: str, gbps: float, model_id: str, placed: Placement, tok_s: float, source: str
) -> None:
    m = model(model_id)
    v = variant(m, "MXFP4" if model_id == MIXTURE else "Q4_K_M")
    found = speed.decode(machine(name, gbps), m, v, RunSettings(4096, placement=placed))
    assert found.low <= tok_s <= found.high, (found, source)


def test_each_offloaded_expert_layer_costs_time_in_proportion_to_its_bytes() -> None:
    device, m = resolve("RTX 4090 + 128GB RAM"), model(MIXTURE)
    rates = [
        speed.decode(
            device, m, variant(m), RunSettings(4096, placement=Placement(experts_on_host=k))
        ).value
        for k in (0, 9, 18, 36)
    ]
    assert rates == sorted(rates, reverse=True)
    # Twice as many layers add twice as much time.
    extra = [1 / r - 1 / rates[0] for r in rates[1:]]
    assert extra[1] / extra[0] == pytest.approx(2, rel=0.05)
    assert extra[2] / extra[1] == pytest.approx(2, rel=0.05)
    assert math.isfinite(rates[-1])


def test_faster_system_memory_speeds_up_offloaded_experts() -> None:
    m = model(MIXTURE)
    slow, fast = (resolve(f"RTX 4090 + 128GB DDR5-{rate}") for rate in (4800, 6400))
    placed = RunSettings(4096, placement=Placement(experts_on_host=36))
    rates = [speed.decode(d, m, variant(m), placed).value for d in (slow, fast)]
    assert 1.1 < rates[1] / rates[0] < 6400 / 4800


def test_a_split_run_does_not_distort_predictions_for_unsplit_ones() -> None:
    """A split run with the predicted speed for its placement does not change other predictions."""
    device, m, other = resolve("RTX 4090 + 128GB RAM"), model(MIXTURE), model("qwen3-8b")
    v, placed = variant(m), Placement(experts_on_host=30)
    as_run = RunSettings(4096, placement=placed)
    decoded = speed.decode(device, m, v, as_run).value
    prefilled = speed.prefill(device, m, v, as_run).value
    ran = Measured(
        m, v, "llamacpp", decoded, prefill_tok_s=prefilled, prompt_tokens=2048, placement=placed
    )
    for said in (speed.decode, speed.prefill):
        before, after = (
            said(device, other, variant(other), measured=known).value for known in ((), (ran,))
        )  # type: ignore[operator]
        assert after == pytest.approx(before, rel=0.02)
    again = speed.decode(device, m, v, as_run, measured=(ran,))
    assert again.value == pytest.approx(decoded, rel=0.02)


def test_cards_that_work_concurrently_hold_more_copies_of_step_inputs() -> None:
    """llama.cpp with two devices, 6 layers as wide as Qwen3-30B-A3B's, 16,384 cells, steps of 512:
    164.4 MiB of scratch on a card, compared with 104 on a single device, and 60 MiB more on the
    host. If experts are placed separately, there is no difference."""
    m = model("qwen3-30b-a3b")
    run = RunSettings(16384, n_batch=512)
    assert memory.pipeline_bytes(m, run, 2) / 2**20 == pytest.approx(60, abs=0.5)
    assert memory.pipeline_bytes(m, run, 1) == 0
    assert memory.pipeline_bytes(m, run.placed(experts_on_host=3), 2) == 0
