"""The start of `localllm serve` with models that cannot be loaded."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import httpx
import pytest

from localllm.library import store
from models import tiny_lora
from models.tiny_bert import write_bert

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no AF_UNIX in Python")


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a model whose weights are truncated after a valid header, and install a valid one."""
    library = tmp_path / "library"
    library.mkdir()
    shutil.copy(tiny_model, library / "sound.gguf")
    store.adopt(library)
    path = tmp_path / "broken.gguf"
    path.write_bytes(tiny_model.read_bytes()[:-1000])
    return path


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Run `localllm serve` on a Unix socket, and yield it with a client."""
    with tempfile.TemporaryDirectory(prefix="ll") as folder:
        path = Path(folder) / "s.sock"
        command = [
            sys.executable,
            "-m",
            "localllm",
            "serve",
            *arguments,
            "--unix",
            str(path),
            "--context",
            "512",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        transport = httpx.HTTPTransport(uds=str(path))
        try:
            with httpx.Client(
                transport=transport, base_url="http://localllm", timeout=60
            ) as client:
                yield process, client
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def test_a_damaged_file_as_the_only_named_model_ends_the_server(broken: Path) -> None:
    with serving(str(broken), "--quiet") as (process, _):
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(30) == 4
        assert "error: " in said
        assert "hint: " in said


def test_a_damaged_file_is_named_and_another_model_is_served(
    broken: Path, tiny_model: Path
) -> None:
    with serving(str(broken), "--also", str(tiny_model), "--quiet") as (process, http):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("error: broken could not be loaded: ")
        assert process.stderr.readline().startswith("hint: ")
        body = {"model": tiny_model.stem, "prompt": "a", "max_tokens": 1, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("pooling", [1, 4], ids=["embeds", "ranks"])
def test_an_embedding_or_reranking_model_is_served_alone_or_with_another(
    pooling: int, tiny_model: Path, tmp_path: Path
) -> None:
    path = write_bert(tmp_path / "vectors.gguf", pooling=pooling)
    for named in ([str(path)], [str(tiny_model), "--also", str(path)]):
        with serving(*named, "--only") as (process, http):
            assert process.stderr is not None
            said = [*takewhile(lambda line: not line.startswith("serving on"), process.stderr)]
            assert any("vectors: context" in line and "GB allocated" in line for line in said), said
            asked = (
                {"model": "vectors", "input": "a"}
                if pooling == 1
                else {"query": "a", "documents": ["b"]}
            )
            answer = http.post(
                "/v1/embeddings" if pooling == 1 else "/v1/rerank",
                json={**asked, "model": "vectors"},
            )
            assert answer.status_code == 200, answer.text


def test_the_start_line_names_context_engine_and_accelerator(tiny_model: Path) -> None:
    with serving(str(tiny_model)) as (process, _):
        assert process.stderr is not None
        line = next(line for line in process.stderr if " allocated" in line)
    for part in (
        f"{tiny_model.stem}: context 512 tokens",
        f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})",
        "KV f16",
        "drafting auto",
    ):
        assert part in line
    assert line.rpartition(", on ")[2].strip(), "the accelerator is missing"


def test_a_name_without_memory_of_its_own_names_the_model_that_holds_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    adapter = tiny_lora.write(tmp_path / "formal.gguf", tiny_model)
    with serving(str(tiny_model), "--lora", f"{adapter}:0", "--only") as (process, _):
        assert process.stderr is not None
        said = [*takewhile(lambda line: not line.startswith("serving on"), process.stderr)]
    assert sum(" allocated" in line for line in said) == 1
    assert any(
        "formal: " in line and f"in the memory of {tiny_model.stem}" in line for line in said
    )
