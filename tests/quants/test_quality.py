"""`localllm quality`: the figures equal those of a direct computation, and planted faults are
named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from localllm.cli.all_commands import app as all_commands
from localllm.cli.commands.quality import quality
from localllm.errors import BackendError, UsageError
from localllm.library.resolve import resolve
from localllm.load.measured_losses import MeasuredLoss, keep_loss, read_losses
from localllm.quants import quality as measuring
from localllm.quants.quality import EngineModel, QualityFigures
from localllm.quants.verdict import expected_loss, file_faults
from localllm_backends import registry
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.quality_process import spread
from models.altered import write_altered, write_quant
from models.gguf_reader import GGUFReader
from models.tiny_gguf import write_llama

app = typer.Typer()
app.command()(quality)
BLOCK = 64
TEXT = " ".join(f"word {n} of a short text" for n in range(40))


def run(*arguments: object) -> Result:
    """Run a command. Raise an error of ours, which the root command would catch."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def measured(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--block", BLOCK, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def kinds(body: dict[str, Any]) -> list[str]:
    return [fault["kind"] for fault in body["faults"]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of random weights in F32, with the keys of real files.

    Its norms differ from layer to layer.
    """
    folder = tmp_path_factory.mktemp("exact")
    plain = write_llama(folder / "plain.gguf", layers=3, e=256, template="{{ messages }}")
    keys = {"llama.rope.freq_base": 10_000.0, "tokenizer.ggml.add_bos_token": True}
    file = write_altered(plain, folder / "Tiny-F32.gguf", fields=keys)
    return with_own_norms(file)


def with_own_norms(file: Path) -> Path:
    reader = GGUFReader(file, "r+")
    for number, tensor in enumerate(reader.tensors):
        if tensor.name.endswith("_norm.weight"):
            tensor.data[:] = 1 + 0.01 * number
    return file


@pytest.fixture(scope="module")
def quant(exact: Path) -> Path:
    return write_quant(exact, exact.with_name("Tiny-Q4_0.gguf"), "Q4_0")


# --- the figures ----------------------------------------------------------------------------------


def log_rows(path: Path, blocks: list[list[int]]) -> list[np.ndarray]:
    """Return log-probabilities after each token of each block, computed with one token per step."""
    backend = backend_type.load(LoadSpec(str(path), n_ctx=BLOCK, n_seq_max=1, n_batch=64))
    found = []
    for block in blocks:
        sequence = backend.new_sequence()
        logits = [backend.step([Chunk(sequence, [token])]).logits(0)[0].copy() for token in block]
        backend.drop(sequence)
        rows = np.array(logits, dtype=np.float64)
        found.append(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))
    backend.close()
    return found


def tokens_of(path: Path) -> list[int]:
    backend = backend_type.load(LoadSpec(str(path), n_ctx=BLOCK, n_seq_max=1))
    tokens = backend.tokenize(TEXT, special=False, add_bos=True)
    backend.close()
    return tokens


def test_figures_equal_those_of_a_direct_computation(exact: Path, quant: Path, text: Path) -> None:
    body = measured(quant, "--against", exact, "--text", text, "--blocks", 3)
    tokens = tokens_of(exact)
    n_blocks = len(tokens) // BLOCK
    chosen = spread(n_blocks)[:3]
    # Each block starts with BOS, and its second half is evaluated.
    blocks = [[1, *tokens[n * BLOCK + 1 : (n + 1) * BLOCK]] for n in chosen]
    kl, nll, same = [], [], []
    for right, near, block in zip(
        log_rows(exact, blocks), log_rows(quant, blocks), blocks, strict=True
    ):
        for at in range(BLOCK // 2, BLOCK - 1):
            kl.append((np.exp(right[at]) * (right[at] - near[at])).sum())
            nll.append(-near[at][block[at + 1]])
            same.append(right[at].argmax() == near[at].argmax())
    assert body["tokens"] == len(kl) == 3 * (BLOCK // 2 - 1)
    assert body["kl_divergence_nats"]["value"] == pytest.approx(np.mean(kl), rel=0.01)
    assert body["perplexity"]["value"] == pytest.approx(math.exp(np.mean(nll)), rel=0.01)
    assert body["same_top_token"]["value"] == pytest.approx(np.mean(same), abs=0.03)
    assert body["kl_divergence_nats"]["error"] > 0
    assert not body["faults"]


def test_models_that_do_not_fit_together_are_measured_in_turn(
    exact: Path, quant: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.cli import model_quality

    words = (quant, "--against", exact, "--text", text, "--blocks", 2)
    together = measured(*words)
    monkeypatch.setattr(model_quality, "free_for_models", lambda: 0)
    in_turn = measured(*words)
    for name in ("kl_divergence_nats", "perplexity", "reference_perplexity", "same_top_token"):
        assert in_turn[name]["value"] == pytest.approx(together[name]["value"], rel=0.01)


def test_a_kv_type_is_compared_with_f16(exact: Path, text: Path) -> None:
    coarse = measured(exact, "--kv", "q4_0", "--text", text, "--blocks", 1)
    fine = measured(exact, "--kv", "q8_0", "--text", text, "--blocks", 1)
    assert coarse["kl_divergence_nats"]["value"] > fine["kl_divergence_nats"]["value"] > 0
    assert coarse["perplexity"]["error"] is None


def test_the_planner_uses_the_loss_that_was_measured_here(
    exact: Path, quant: Path, text: Path
) -> None:
    text.write_text(TEXT * 4)
    assert read_losses() == []
    found = measured(quant, "--against", exact, "--text", text, "--blocks", 24)
    (loss,) = read_losses()
    assert (loss.quant, loss.reference) == ("Q4_0", "F32")
    assert loss.ln_ratio == pytest.approx(found["ln_perplexity_ratio"]["value"], abs=1e-6)
    asked = ["recommend", "-m", "qwen3-8b:Q4_K_M", "--device", "RTX 4090"]

    def answered(*more: str) -> str:
        return CliRunner().invoke(all_commands, [*asked, *more]).stdout

    before = json.loads(answered("--json"))["plans"][0]["quality"]
    assert not keep_loss(MeasuredLoss("qwen3-8b", "Q4_K_M", 0.5, error=0.5))
    assert keep_loss(MeasuredLoss("qwen3-8b", "Q4_K_M", 0.5, error=0.01))
    after = json.loads(answered("--json"))["plans"][0]["quality"]
    assert after["points"] < before["points"]
    assert after["basis"] == before["basis"] + "; loss of Q4_K_M measured here"
    assert "loss of Q4_K_M measured here" in answered("--explain")


def test_the_first_blocks_are_spread_over_the_text() -> None:
    assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert spread(1) == [0]
    for n in range(1, 40):
        assert sorted(spread(n)) == [*range(n)]


def test_the_most_exact_file_of_the_model_is_the_reference(quant: Path, text: Path) -> None:
    body = measured(quant, "--text", text, "--blocks", 1)
    assert Path(body["reference"]).name == "Tiny-F32.gguf"


def test_without_a_reference_there_is_only_perplexity(exact: Path, text: Path) -> None:
    body = measured(exact, "--text", text, "--blocks", 2)
    assert body["reference"] is None
    assert body["perplexity"]["value"] > 1
    assert "kl_divergence_nats" not in body


def test_measuring_ends_when_the_error_is_small() -> None:
    block = {"tokens": 10, "nll": 30, "reference_nll": 29, "same_top": 9}
    found = QualityFigures([{**block, "kl": 0.5 + 0.001 * n} for n in range(3)], has_reference=True)
    assert not found.is_enough, "the fewest blocks"
    found.blocks.append({**block, "kl": 0.5})
    assert found.is_enough
    found.blocks.append({**block, "kl": 5.0})
    assert not found.is_enough


def test_ctrl_c_ends_with_the_figures_so_far(exact: Path) -> None:
    def stop(_found: QualityFigures, _n_blocks: int) -> None:
        raise KeyboardInterrupt

    model = EngineModel("llamacpp", LoadSpec(str(exact)))
    order = measuring.QualityOrder(model, None, TEXT, blocks=3, block_tokens=BLOCK)
    found = measuring.measure(order, stop, lambda _stored, _of: None)
    assert len(found.blocks) == 1
    assert found.perplexity.value > 1


def test_the_shipped_text_has_enough_blocks() -> None:
    # English has about four characters per token.
    assert len(measuring.sample_text()) > 20 * 4 * measuring.BLOCK_TOKENS


def test_a_text_without_a_whole_block_is_refused(exact: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(BackendError, match="fewer than one block"):
        measured(exact, "--text", short)


def test_wrong_options_are_refused(exact: Path) -> None:
    with pytest.raises(UsageError, match="no KV type 'q9'"):
        run(exact, "--kv", "q9")
    with pytest.raises(UsageError, match="takes no --against"):
        run(exact, "--kv", "q8_0", "--against", exact)


def test_tools_compares_the_templates(exact: Path, quant: Path, text: Path, tmp_path: Path) -> None:
    stale = write_altered(
        quant, tmp_path / "Tiny-Q4_0.gguf", fields={"tokenizer.chat_template": "{{ messages[0] }}"}
    )
    words = ("--against", exact, "--text", text, "--blocks", 1, "--tools")
    assert measured(quant, *words)["tool_differences"] == []
    assert measured(stale, *words, code=4)["tool_differences"]


# --- planted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "named", "fault"),
    [
        ("metadata", "rope.freq_base is 500000", {"fields": {"llama.rope.freq_base": 500_000.0}}),
        ("metadata", "rope.freq_base is missing", {"fields": {"llama.rope.freq_base": None}}),
        ("layers", "layer 0 is layer 2", {"swapped_layers": (0, 2)}),
        ("vocabulary", "has 500 tokens, but 512", {"n_tokens": 500}),
        ("template", "not that of Tiny-F32", {"fields": {"tokenizer.chat_template": "{{ 1 }}"}}),
        ("template", "no chat template", {"fields": {"tokenizer.chat_template": None}}),
    ],
)
def test_a_fault_that_the_files_show_is_named(
    exact: Path, quant: Path, tmp_path: Path, kind: str, named: str, fault: dict[str, Any]
) -> None:
    faulty = write_altered(quant, tmp_path / "Tiny-Q4_0.gguf", **fault)
    (found,) = file_faults(resolve(str(faulty)), resolve(str(exact)))
    assert found.kind == kind
    assert named in found.text


def test_a_missing_bos_token_is_named(exact: Path, quant: Path, text: Path, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.add_bos_token": False}
    faulty = write_altered(quant, tmp_path / "Tiny-Q4_0.gguf", fields=fields)
    words = (faulty, "--against", exact, "--text", text, "--blocks", 1, "--block", BLOCK)
    result = run(*words)
    assert result.exit_code == 4
    assert "fault: it begins a text with another BOS token" in result.stdout
    assert "KL divergence" in result.stdout


def test_another_vocabulary_is_not_compared(
    exact: Path, quant: Path, text: Path, tmp_path: Path
) -> None:
    """Another vocabulary is not compared.

    Its model reads other tokens, so the probabilities would be of different texts.
    """
    tokens = GGUFReader(quant).fields["tokenizer.ggml.tokens"].contents()
    tokens[300] = "w"
    faulty = write_altered(
        quant, tmp_path / "Tiny-Q4_0.gguf", fields={"tokenizer.ggml.tokens": tokens}
    )
    body = measured(faulty, "--against", exact, "--text", text, "--blocks", 1, code=4)
    assert kinds(body) == ["vocabulary"]
    assert "kl_divergence_nats" not in body
    shown = run(
        faulty, "--against", exact, "--text", text, "--blocks", 1, "--block", BLOCK, "--quiet"
    )
    (line,) = shown.stdout.splitlines()
    assert line.startswith("fault: ")
    healthy = run(exact, "--text", text, "--blocks", 1, "--block", BLOCK, "--quiet")
    assert (healthy.exit_code, healthy.stdout, healthy.stderr) == (0, "", "")


def test_the_faults_of_a_file_that_no_engine_runs_are_named(
    exact: Path, quant: Path, text: Path, tmp_path: Path
) -> None:
    """The faults of a file that no engine can run are named.

    Without the last byte tokens of its vocabulary, llama.cpp aborts.
    """
    faulty = write_altered(quant, tmp_path / "Tiny-Q4_0.gguf", n_tokens=100)
    body = measured(faulty, "--against", exact, "--text", text, code=4)
    assert kinds(body) == ["vocabulary", "engine"]
    assert "perplexity" not in body


def test_a_smaller_type_than_the_name_states_is_named(quant: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "Tiny-Q8_0.gguf"
    renamed.write_bytes(quant.read_bytes())
    (found,) = file_faults(resolve(str(renamed)), None)
    assert found.kind == "quant"
    assert "most of its weights are Q4_0" in found.text


def test_a_healthy_quant_has_no_fault(exact: Path, quant: Path) -> None:
    assert file_faults(resolve(str(quant)), resolve(str(exact))) == []
    assert file_faults(resolve(str(exact)), None) == []


# Mean KL divergence in nats of quants of SmolLM2-135M against F16, for 2 blocks of the shipped
# text. `localllm quantize` made them from F32, and the faulty Q4_K_M from the Q2_K.
_SMOLLM2_PARAMS = 134_515_008
_HEALTHY = {
    "Q8_0": 0.0046, "Q6_K": 0.0091, "Q5_K_M": 0.0754, "Q5_0": 0.0775, "Q4_K_M": 0.0558,
    "Q4_K_S": 0.0620, "Q4_1": 0.0031, "Q4_0": 0.2501, "IQ4_XS": 0.1915, "Q3_K_M": 0.1265,
    "Q3_K_S": 0.4761, "Q2_K": 0.4761,
}  # fmt: skip
_MADE_OF_Q2_K = {"Q4_K_M": 0.4785}


def test_only_a_loss_far_above_the_published_one_is_a_fault() -> None:
    for quant, kl in _HEALTHY.items():
        expected = expected_loss(quant, _SMOLLM2_PARAMS)
        assert expected is not None
        assert expected.ratio(kl) < 3, quant
    for quant, kl in _MADE_OF_Q2_K.items():
        expected = expected_loss(quant, _SMOLLM2_PARAMS)
        assert expected is not None
        assert expected.ratio(kl) > 3, quant


# --- MLX ------------------------------------------------------------------------------------------


@pytest.mark.mlx
def test_mlx_folders_are_measured(text: Path, tmp_path: Path) -> None:
    if registry.backends()["mlx"].available() is not None:
        pytest.skip("MLX is not installed")
    from models import tiny_mlx

    source = tiny_mlx.write_llama(tmp_path / "Tiny-bf16")
    quant = tiny_mlx.write_4bit(tmp_path / "Tiny-4bit")
    body = measured(quant, "--against", source, "--text", text, "--blocks", 2)
    assert body["kl_divergence_nats"]["value"] > 0
    assert body["faults"] == []
