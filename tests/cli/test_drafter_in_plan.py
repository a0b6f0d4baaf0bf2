"""A second model that drafts is in the plan that is run: counted, and loaded as it was counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli.compose.load_plan import load_plan_named
from localllm.cli.compose.load_spec import load_spec, run_settings
from localllm.engine.worker import backends
from localllm.settings import Settings


@pytest.mark.parametrize("context", [None, 2048])
def test_a_named_drafter_is_counted_in_what_is_launched(smollm2: Path, context: int | None) -> None:
    alone = load_plan_named(str(smollm2), Settings({"context": context, "draft": "off"}))
    drafted = load_plan_named(str(smollm2), Settings({"context": context, "draft": str(smollm2)}))
    assert alone.plan is not None
    assert drafted.plan is not None
    assert drafted.options.draft_path == str(smollm2)
    assert alone.plan.memory.draft_bytes == 0
    assert drafted.plan.memory.draft_bytes > 0.9 * smollm2.stat().st_size
    assert drafted.needs_bytes - alone.needs_bytes == drafted.plan.memory.draft_bytes


def test_what_is_loaded_is_what_was_planned(smollm2: Path) -> None:
    load = load_plan_named(str(smollm2), Settings({"context": 4096, "kv_type": "q8_0", "parallel": 3}))
    assert load.plan is not None
    spec, planned = load.options.spec, load.plan.settings
    assert (spec.n_ctx, spec.n_seq_max, spec.kv_type_k, spec.kv_type_v) == (4096, 3, "q8_0", "q8_0")
    assert (planned.n_ctx, planned.slots, planned.kv_type_k, planned.kv_type_v) == (4096, 3, "q8_0", "q8_0")
    assert (spec.n_batch, spec.n_outputs, spec.n_gpu_layers) == (
        planned.n_batch, planned.n_outputs, planned.n_gpu_layers,
    )  # fmt: skip
    backend = backends.for_path(str(smollm2)).load(spec)
    try:
        assert (backend.info.n_batch, backend.info.kv_type_k) == (planned.n_batch, "q8_0")
    finally:
        backend.close()


def test_a_file_that_cannot_be_planned_is_loaded_with_what_was_chosen_and_the_backends_defaults() -> None:
    chosen = Settings({"context": 4096, "kv_type": "q8_0", "parallel": 3, "draft": "mtp"})
    spec = load_spec("m.gguf", run_settings(None, chosen), n_threads=2)
    assert (spec.n_ctx, spec.n_seq_max, spec.n_batch, spec.n_outputs, spec.n_threads) == (4096, 3, 0, 0, 2)
    assert (spec.kv_type_k, spec.kv_type_v, spec.n_gpu_layers, spec.mtp) == ("q8_0", "q8_0", -1, True)
    plain = load_spec("m.gguf", run_settings(None, Settings()))
    assert (plain.n_ctx, plain.kv_type_k, plain.mtp) == (0, "f16", False)
