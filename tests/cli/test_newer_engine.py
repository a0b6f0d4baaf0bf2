"""A model of an architecture that the installed llama.cpp lacks.

Every command names the required release before it loads anything.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.cli.chat.model_service import LocalModelService
from localllm.errors import LocalLLMError, ModelNotFoundError
from localllm.library import store
from localllm.library.catalog import load_catalog, user_folder
from localllm.load.load_plan import make_load_plan
from localllm.load.readable_models import EngineTooOldError
from localllm.settings import Settings
from localllm_tui.control.interfaces import PlanRequest

NEEDED = "needs llama.cpp 1.0 or newer: `localllm setup --engine latest`"
FAMILY = """
family = "lfm3"

[[models]]
id = "lfm3-test"
name = "LFM3 Test"
hf_repo = "example/LFM3-Test"
gguf_architecture = "lfm3"
params = 310_000_000
layers = 20
hidden = 1024
ffn = 3072
heads = 16
kv_heads = 4
head_dim = 64
vocab = 49152
context = 8192

[[models.gguf]]
repo = "example/LFM3-Test-GGUF"
file = "LFM3-Test.{quant}.gguf"
bytes = { Q4_K_M = 200_000_000 }
"""


@pytest.fixture
def newer_model() -> None:
    """Write a user's catalog file with a model of the architecture lfm3."""
    user_folder().mkdir(parents=True)
    (user_folder() / "lfm3.toml").write_text(FAMILY)
    model = load_catalog().get("lfm3-test")
    assert model is not None
    assert model.gguf_architecture == "lfm3"


def renamed(model: Path, to: Path, architecture: bytes) -> Path:
    """Return a copy of a llama model whose architecture has another name of five letters."""
    name = len(b"llama").to_bytes(8, "little")
    content = model.read_bytes().replace(name + b"llama", name + architecture, 1)
    to.write_bytes(content)
    return to


def test_recommend_lists_the_model_with_the_release_that_it_needs(newer_model: None) -> None:
    shown = " ".join(CliRunner().invoke(app, ["recommend"]).output.split())
    assert f"LFM3 Test: {NEEDED}" in shown
    result = CliRunner().invoke(app, ["recommend", "-m", "lfm3-test"])
    assert isinstance(result.exception, ModelNotFoundError)
    assert result.exception.hint == NEEDED


def test_plans_for_another_machine_ignore_the_engine_installed_here(newer_model: None) -> None:
    shown = CliRunner().invoke(app, ["recommend", "-m", "lfm3-test", "--device", "M4 Max 128GB"])
    assert "Q4_K_M" in shown.output
    assert NEEDED not in shown.output


def test_the_models_screen_explains_a_model_that_needs_a_newer_engine(newer_model: None) -> None:
    service = LocalModelService()
    plans = service.plan(PlanRequest(purpose="chat"))
    assert "lfm3-test" not in {choice.ref.partition(":")[0] for choice in plans.choices}
    assert service.explain(PlanRequest(), "lfm3-test", 80) == [NEEDED]


def test_pull_prints_a_note_before_it_downloads(newer_model: None) -> None:
    result = CliRunner().invoke(app, ["pull", "lfm3-test"])
    assert isinstance(result.exception, LocalLLMError), result.output
    assert f"note: lfm3-test {NEEDED}" in result.output


def test_a_file_of_an_unknown_architecture_is_refused_before_the_loader(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "library"
    folder.mkdir()
    renamed(tiny_model, folder / "new.gguf", b"zzzzz")
    store.adopt(folder)
    (local,) = [found for found in store.scan() if found.name == "new"]
    with pytest.raises(EngineTooOldError) as caught:
        make_load_plan(local, Settings())
    assert caught.value.message == (
        "new needs a llama.cpp newer than 0.5.0: it has the architecture 'zzzzz', which the "
        "installed one can't read"
    )
    assert "localllm setup --engine latest" in (caught.value.hint or "")
