"""Tables of which a token reads only a few rows stay on the disk: in the plan, in the load, in the
prediction, and in a warning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.device.name_lookup import resolve
from localllm.load.options import load_spec
from localllm.planner import layer_bytes, memory, speed
from localllm.planner.explain import explain
from localllm.planner.plan import plan_for
from localllm.planner.recommend import recommend
from localllm.planner.types import Plan, RunSettings, Workload
from localllm_catalog import catalog, from_gguf, gguf
from models import sparse_gguf
from support import plan_probe
from support.plan_probe import ProbeSettings

MODELS = {m.id: m for m in catalog.load().models}
MODEL = MODELS["qwen3.8-flash-next"]
BIG = next(v for v in MODEL.variants if v.quant == "UD-Q4_K_XL")
# One tensor of 160 x 320,001,536 weights in IQ4_NL (github.com/0xBakeer/inference-atlas, pull
# request 34: 26.8 GiB).
TABLE_BYTES = 160 * 320_001_536 * 9 // 16


def planned(machine: str) -> Plan:
    return plan_for(resolve(machine), MODEL, BIG, Workload())


def test_a_per_layer_table_stays_on_disk_in_plan_and_load_spec() -> None:
    plan = planned("DGX Spark")
    assert plan.memory.disk_bytes == TABLE_BYTES
    assert plan.memory.weights_bytes == BIG.file_bytes - TABLE_BYTES
    assert plan.settings.placement.tables == "disk"
    assert load_spec("x.gguf", plan.settings).placement.tables == "disk"
    whole = memory.need(MODEL, BIG, plan.settings.placed(tables="memory"), resolve("DGX Spark"))
    assert (whole.disk_bytes, whole.weights_bytes) == (0, BIG.file_bytes)


def test_with_a_card_the_table_does_not_count_in_system_memory() -> None:
    plan, device = planned("RTX 4090 + 128GB RAM"), resolve("RTX 4090 + 128GB RAM")
    assert plan.fits == "split"
    whole = memory.need(MODEL, BIG, plan.settings.placed(tables="memory"), device)
    assert whole.host_bytes - plan.memory.host_bytes == TABLE_BYTES
    assert whole.total_bytes == plan.memory.total_bytes


def test_without_the_table_on_disk_the_model_would_not_fit() -> None:
    """The 128 GB of a Strix Halo hold the remaining 77 GiB, and 64 GB of RAM with a card hold the
    experts."""
    assert planned("Strix Halo 128GB").fits == "yes"
    assert planned("RTX 4090 + 64GB RAM").fits == "split"


def test_the_measured_speed_is_in_the_range() -> None:
    """One DGX Spark with the table cold and warm: 34.1 to 39.7 tokens/s (same source, pull requests
    79 to 81)."""
    decode = planned("DGX Spark").decode_tok_s
    assert decode.low <= 37 <= decode.high


def test_rows_cost_time_and_a_slow_disk_is_warned_about() -> None:
    device, plan = resolve("DGX Spark"), planned("DGX Spark")
    held = plan.settings.placed(tables="memory")
    slower = (
        1 / speed.decode(device, MODEL, BIG, plan.settings).value
        - 1 / speed.decode(device, MODEL, BIG, held).value
    )
    assert slower == pytest.approx(16 * layer_bytes.ROW_S)
    assert (
        1 / speed.prefill(device, MODEL, BIG, plan.settings).value
        > 1 / speed.prefill(device, MODEL, BIG, held).value
    )
    (shown,) = recommend(device, [MODEL], Workload()).plans
    assert any("needs an SSD; a hard disk would give about 5" in reason for reason in shown.reasons)
    assert any(line.startswith("  on disk") for line in explain(plan, device))


def test_small_tables_are_loaded_into_memory() -> None:
    small = MODELS["gemma-4-e2b-it"]
    for variant in small.variants:
        assert (
            memory.need(
                small, variant, planned("DGX Spark").settings.placed(tables="auto")
            ).disk_bytes
            == 0
        )


def test_the_table_size_from_a_header_is_its_share_of_the_input_weights() -> None:
    tokens = MODEL.vocab_size * MODEL.hidden_size
    header = replace(BIG, input_bytes=(MODEL.lookup_params + tokens) // 2)
    assert layer_bytes.table_bytes(MODEL, header) == pytest.approx(
        MODEL.lookup_params / 2, rel=1e-6
    )


def test_the_closed_form_agrees_with_llamacpp_on_tables_indexers_and_streams(
    tmp_path: Path,
) -> None:
    path = sparse_gguf.write(sparse_gguf.FLASH_NEXT, tmp_path)
    model = from_gguf.model_from_gguf(gguf.read(path))
    assert (model.lookup_rows, model.residual_streams, model.shape_warning) == (16, 4, "")
    asked = [
        ProbeSettings(n_ctx=8192, n_seq_max=4),
        ProbeSettings(n_ctx=32768, n_seq_max=1, kv_type_k="q8_0", kv_type_v="q8_0"),
        ProbeSettings(n_ctx=8192, n_seq_max=5, n_ubatch=2048, n_outputs=64),
    ]
    for s, planned in zip(asked, plan_probe.plan(path, asked), strict=True):
        run = RunSettings(
            s.n_ctx,
            s.kv_type_k,
            s.kv_type_v,
            s.n_seq_max,
            n_batch=s.n_ubatch,
            n_outputs=max(s.n_outputs, s.n_seq_max),
        )
        need = memory.need(model, model.variants[0], run)
        assert need.weights_bytes + need.disk_bytes == planned.weights_bytes
        assert need.disk_bytes > 4 * 2**30
        assert need.kv_bytes == pytest.approx(planned.kv_bytes, abs=0.0101 * 2**20)
        assert need.recurrent_bytes == pytest.approx(planned.recurrent_bytes, abs=0.00501 * 2**20)
        assert need.compute_bytes == pytest.approx(
            (planned.compute_bytes or 0) + (planned.output_bytes or 0), rel=0.01
        )
