"""`localllm quantize`: the tensors of its quants, their sources, and files left after failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import typer
from gguf import GGMLQuantizationType
from gguf.quants import quantize as quantised
from typer.testing import CliRunner, Result

from localllm import paths
from localllm.cli.commands import models
from localllm.cli.commands.quantize import quantize
from localllm.errors import BackendError, DoesNotFitError, LocalLLMError, UsageError
from localllm.library import store
from localllm.library.resolve import resolve
from localllm.load.load_plan import load_plan_named
from localllm.memory.system import SystemMemory
from localllm.settings import Settings
from localllm_backends import registry
from localllm_backends.contract import LoadError
from localllm_backends.llamacpp.imatrix import read_imatrix
from models.dequantised import write_dequantised
from models.gguf_reader import GGUFReader
from models.tiny_gguf import write_llama, write_moe
from support.until import until

app = typer.Typer()
app.command()(quantize)
app.add_typer(models.app, name="models")


def run(*arguments: object) -> Result:
    """Run a command. Raise an error of ours, which the root command would catch."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def made(source: Path, quant: str, *options: object) -> dict[str, Any]:
    result = run("quantize", source, "--to", quant, "--json", *options)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def tensors(path: Path | str) -> dict[str, tuple[str, bytes]]:
    reader = GGUFReader(path)
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in reader.tensors}


def facts(path: str) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def leftovers() -> list[Path]:
    return [path for path in paths.data_dir().rglob("*") if path.is_file()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a tiny model in F32 with rows of 256, which every format supports."""
    return write_llama(tmp_path / "model" / "Tiny-F32.gguf", e=256)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()


# --- the tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1"])
def test_tensors_are_those_of_ggufs_own_quantiser(source: Path, quant: str) -> None:
    """The tensors equal those of gguf's own quantiser.

    Its NumPy code is a second implementation of these formats.
    """
    plain = {t.name: t.data for t in GGUFReader(source).tensors}
    result = tensors(made(source, quant)["path"])
    kind = GGMLQuantizationType[quant]
    compared = 0
    for name, (type_name, data) in result.items():
        if type_name == quant:
            assert data == quantised(np.array(plain[name]), kind).tobytes(), name
            compared += 1
    assert compared >= 14


@pytest.mark.parametrize(
    "quant", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_XS"]
)
def test_tensors_are_those_of_llama_quantize(source: Path, tmp_path: Path, quant: str) -> None:
    program = os.environ.get("LOCALLLM_LLAMA_QUANTIZE")
    if not program:
        pytest.skip("LOCALLLM_LLAMA_QUANTIZE names no llama-quantize")
    matrix = write_matrix(source, tmp_path / "other" / "imatrix.gguf")
    for options in ([], ["--imatrix", str(matrix)]):
        theirs = tmp_path / "theirs.gguf"
        subprocess.run([program, *options, source, theirs, quant], check=True, capture_output=True)
        ours = tmp_path / f"ours{len(options)}.gguf"
        made(source, quant, "--output", ours, *options)
        assert tensors(ours) == tensors(theirs)


def test_the_tensors_that_stay_larger_are_named(source: Path) -> None:
    larger = {kind["name"]: kind for kind in made(source, "Q4_K_M")["larger_tensors"]}
    assert larger["output.weight"]["type"] == "Q6_K"
    assert (larger["output.weight"]["count"], larger["output.weight"]["of"]) == (1, 1)


def test_the_matrix_and_the_tensors_that_stay_larger_are_printed(source: Path) -> None:
    write_matrix(source, source.parent / "Tiny.imatrix.gguf")
    said = run("quantize", source, "--to", "Q3_K_M").stderr
    assert "Tiny.imatrix.gguf" in said
    assert "larger than Q3_K_M" in said
    assert "output.weight: Q6_K" in said


# --- the importance matrix ------------------------------------------------------------------------


def importance(source: Path) -> dict[str, np.ndarray]:
    """Return mean squares of the inputs of each matrix: the later columns matter far more."""
    found = {}
    for tensor in GGUFReader(source).tensors:
        if len(tensor.shape) > 1 and not tensor.name.startswith("token_embd"):
            n_experts = int(tensor.shape[2]) if len(tensor.shape) > 2 else 1
            row = np.geomspace(1e-3, 1e3, int(tensor.shape[0]), dtype=np.float32)
            found[tensor.name] = np.tile(row, (n_experts, 1))
    return found


def write_matrix(source: Path, path: Path, *, count: float = 4.0) -> Path:
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.train.raw"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in importance(source).items():
        writer.add_tensor(f"{name}.in_sum2", values * np.float32(count))
        counts = np.full((len(values), 1), count, dtype=np.float32)
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_older_matrix(source: Path, path: Path) -> Path:
    entries = importance(source)
    parts = [struct.pack("<i", len(entries))]
    for name, values in entries.items():
        sums = (values * np.float32(4)).astype("<f4").tobytes()
        parts.append(struct.pack("<i", len(name)) + name.encode())
        parts.append(struct.pack("<ii", 4, values.size) + sums)
    parts.append(struct.pack("<ii", 7, 3) + b"txt")
    path.write_bytes(b"".join(parts))
    return path


def test_the_matrix_next_to_the_model_is_used_and_named(source: Path) -> None:
    matrix = write_matrix(source, source.parent / "Tiny.imatrix.gguf")
    with_it = made(source, "Q4_K_M")
    assert with_it["imatrix"] == str(matrix)
    stated = facts(with_it["path"])
    assert stated["quantize.imatrix.file"] == matrix.name
    assert stated["quantize.imatrix.dataset"] == "wiki.train.raw"
    assert stated["quantize.imatrix.chunks_count"] == 7
    assert stated["quantize.imatrix.entries_count"] == len(importance(source))
    without = made(source, "Q4_K_M", "--imatrix", "none", "--output", source.with_name("w.gguf"))
    assert without["imatrix"] is None
    assert tensors(with_it["path"]) != tensors(without["path"])


def test_an_older_matrix_format_gives_the_same_tensors(source: Path, tmp_path: Path) -> None:
    newer = write_matrix(source, tmp_path / "m.gguf")
    older = write_older_matrix(source, tmp_path / "m.dat")
    results = [
        made(source, "Q4_K_M", "--imatrix", matrix, "--output", tmp_path / f"{matrix.suffix}.gguf")
        for matrix in (newer, older)
    ]
    assert tensors(results[0]["path"]) == tensors(results[1]["path"])


def test_each_expert_has_its_own_columns(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "Moe-F32.gguf")
    matrix = write_matrix(source, tmp_path / "m.gguf", count=2.0)
    made(source, "Q4_0", "--imatrix", matrix)


def test_a_quant_that_needs_a_matrix_is_refused_without_one(source: Path) -> None:
    with pytest.raises(BackendError) as refused:
        made(source, "IQ2_XXS")
    assert "--imatrix" in refused.value.hint
    assert not leftovers()


@pytest.mark.parametrize(
    "content",
    [b"", b"no matrix", struct.pack("<i", 2**30), struct.pack("<ii", 1, 5) + b"outpu" + bytes(2)],
)
def test_a_file_that_is_no_matrix_is_refused(tmp_path: Path, content: bytes) -> None:
    wrong = tmp_path / "m.dat"
    wrong.write_bytes(content)
    with pytest.raises(LoadError, match=r"m\.dat"):
        read_imatrix(wrong)


def test_a_matrix_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "Other-F32.gguf")
    matrix = write_matrix(other, tmp_path / "m.gguf")
    with pytest.raises(BackendError, match="imatrix size") as refused:
        made(source, "Q4_0", "--imatrix", matrix)
    assert "this very model" in refused.value.hint
    assert not leftovers()


def test_several_matrices_next_to_the_model_are_an_error_that_names_them(source: Path) -> None:
    for name in ("a.imatrix.gguf", "b.imatrix.gguf"):
        write_matrix(source, source.parent / name)
    with pytest.raises(UsageError, match=r"a\.imatrix\.gguf, b\.imatrix\.gguf"):
        made(source, "Q4_0")


# --- the source and the result --------------------------------------------------------------------


def test_the_result_is_listed_planned_and_removable(source: Path) -> None:
    result = made(source, "Q8_0")
    (listed,) = [model for model in store.scan() if model.origin == "quantised"]
    assert (listed.name, listed.quant, str(listed.path)) == ("Tiny-Q8_0", "Q8_0", result["path"])
    assert resolve("Tiny-Q8_0").path == listed.path
    plan = load_plan_named("Tiny-Q8_0", Settings()).plan
    assert plan is not None
    assert plan.variant.file_bytes == result["bytes"]
    run("models", "rm", "Tiny-Q8_0", "-y")
    assert [*paths.quants_dir().iterdir()] == []


def test_the_result_states_its_source_and_is_not_replaced(source: Path) -> None:
    (source.parent / "mmproj-Tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    result = made(source, "Q6_K")
    stated = facts(result["path"])
    assert stated["quantize.source.file"] == "Tiny-F32.gguf"
    assert stated["quantize.source.type"] == "F32"
    assert stated["quantize.source.bytes"] == str(source.stat().st_size)
    assert stated["quantize.program"].startswith("localllm ")
    assert result["mmproj"], "the projector of the source belongs to it, too"
    before = Path(result["path"]).read_bytes()
    with pytest.raises(UsageError, match="exists"):
        made(source, "Q6_K")
    assert Path(result["path"]).read_bytes() == before


def test_only_an_exact_source_is_accepted(source: Path) -> None:
    small = Path(made(source, "Q4_0")["path"])
    with pytest.raises(UsageError, match=r"itself a quant with only 4\.5 bits"):
        made(small, "Q2_K")
    assert made(small, "Q2_K", "--anyway")["quant"] == "Q2_K"
    with pytest.raises(UsageError, match="not smaller"):
        made(source, "F32")


# --- failures -------------------------------------------------------------------------------------


def test_an_unknown_quant_lists_the_known_ones(source: Path) -> None:
    with pytest.raises(BackendError, match="writes no quant 'Q9_X'") as refused:
        made(source, "Q9_X")
    assert "Q4_K_M" in refused.value.hint
    assert not leftovers()


def test_a_damaged_source_leaves_no_files(source: Path) -> None:
    data = source.read_bytes()
    source.write_bytes(data[: len(data) // 2])
    with pytest.raises(LocalLLMError) as refused:
        made(source, "Q4_0")
    assert refused.value.hint
    assert not leftovers()
    assert not [*paths.data_dir().rglob("Tiny")]


def test_a_full_disk_is_refused_before_writing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(DoesNotFitError, match="the disk of"):
        made(source, "Q4_0")
    assert not leftovers()


def test_too_little_memory_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemMemory, "available_bytes", lambda _self: 10_000_000)
    with pytest.raises(DoesNotFitError, match="quantising Tiny"):
        made(source, "Q4_0")


@pytest.fixture(scope="module")
def slow_source(few_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose quantisation takes seconds."""
    return write_dequantised(few_layers, tmp_path_factory.mktemp("slow") / "Slow-F32.gguf")


@pytest.fixture
def command(slow_source: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "localllm", "quantize", str(slow_source), "--to", "IQ4_XS"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: [*paths.data_dir().rglob("*.partial")], "nothing was written")
    yield process
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_leaves_no_files(command: subprocess.Popen[bytes]) -> None:
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait(60) == 130, "it had ended before the signal: the source is too small"
    assert not leftovers()
    assert command.stderr is not None
    assert b"nothing was written" in command.stderr.read()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_command_leaves_no_files(command: subprocess.Popen[bytes]) -> None:
    command.kill()
    until(lambda: not leftovers(), "its file stayed")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts in kilobytes")
def test_peak_memory_is_that_of_a_few_largest_tensors(slow_source: Path) -> None:
    measure = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'localllm', *sys.argv[1:]], check=True,"
        " capture_output=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    words = ["quantize", str(slow_source), "--to", "Q8_0"]
    done = subprocess.run(
        [sys.executable, "-c", measure, *words], capture_output=True, check=True, text=True
    )
    largest_bytes = max(t.n_bytes for t in GGUFReader(slow_source).tensors)
    assert int(done.stdout) * 1024 <= 3 * largest_bytes + 200_000_000


# --- MLX ------------------------------------------------------------------------------------------


@pytest.mark.mlx
def test_mlx_lm_makes_quants_of_mlx_folders(tmp_path: Path) -> None:
    if registry.backends()["mlx"].available() is not None:
        pytest.skip("MLX is not installed")
    from models import tiny_mlx

    source = tiny_mlx.write_llama(tmp_path / "Tiny-bf16")
    result = made(source, "4bit-g32")
    assert (result["origin"], result["quant"], result["format"]) == ("quantised", "4bit", "mlx")
    config = json.loads((Path(result["path"]) / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert config["localllm_quantize"]["quantize.source.file"] == "Tiny-bf16"
    assert load_plan_named(result["path"], Settings()).plan is not None
    with pytest.raises(BackendError, match="already quantised"):
        made(Path(result["path"]), "2bit", "--anyway")
    run("models", "rm", result["name"], "-y")
    assert not Path(result["path"]).exists()
