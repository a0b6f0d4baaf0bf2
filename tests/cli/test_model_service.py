"""The model service of the models screen, with the real planner and the real disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from localllm.cli.chat.model_service import LocalModelService
from localllm.errors import LocalLLMError, UsageError
from localllm.library import store
from localllm_tui.control.interfaces import PlanRequest


def test_plans_depend_on_the_request() -> None:
    service = LocalModelService()
    usual = service.plan(PlanRequest(machine="M4 Max 128GB"))
    assert "M4 Max" in usual.machine
    assert any("for a model" in line for line in usual.accounts)
    first = usual.choices[0]
    assert first.ref.endswith(f":{first.plan['variant']['quant']}")
    assert first.plan["memory"]["total_bytes"] <= first.plan["memory"]["limit_bytes"]
    longer = service.plan(PlanRequest(machine="M4 Max 128GB", context=131072))
    assert longer.left_out["of a shorter context"] > usual.left_out.get("of a shorter context", 0)
    # Memory can hold models that it cannot read fast enough, so these are two separate reasons.
    assert service.plan(PlanRequest(machine="DGX Spark")).left_out["too slow"] > 0
    assert service.plan(PlanRequest(machine="M1 8GB")).left_out["too large"] > 0
    small = service.plan(PlanRequest(machine="M4 Max 128GB", memory_gb=8))
    assert all(o.plan["memory"]["total_bytes"] <= 8 * 2**30 for o in small.choices)
    soon = service.plan(PlanRequest(machine="M4 Max 128GB", longest_wait_s=2))
    assert len(soon.too_slow) == len(usual.choices) - len(soon.choices) > 0
    assert all(o.wait_s <= 2 for o in soon.choices)
    assert any(
        "KV cache" in line
        for line in service.explain(PlanRequest(machine="M4 Max 128GB"), first.ref, 80)
    )
    with pytest.raises(LocalLLMError):
        service.plan(PlanRequest(machine="a toaster"))


def test_models_on_disk_are_listed_with_their_owner_and_memory_to_load(
    tiny_model: Path, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    shutil.copy(tiny_model, library / "mine.gguf")
    store.adopt(library)
    service = LocalModelService()
    found = {m.name: m for m in service.on_disk()}
    mine = found["mine"]
    assert (mine.owner, mine.ours, mine.size_bytes) == (
        "your own folder",
        False,
        tiny_model.stat().st_size,
    )
    assert "GB with" in service.fit(mine)
    with pytest.raises(UsageError, match="belongs to your own folder"):
        service.remove(mine)
    (library / "mine.gguf").unlink()
    with pytest.raises(LocalLLMError, match="no longer on this disk"):
        service.remove(mine)


def test_a_model_that_cannot_be_pulled_is_an_error() -> None:
    with pytest.raises(LocalLLMError):
        LocalModelService(offline=True).pull("qwen3-8b:Q4_K_M", lambda _: None)
