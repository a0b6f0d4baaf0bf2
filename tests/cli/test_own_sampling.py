"""A request without sampling parameters gets the model's own, through `serve` and in the chat.

The order is: the catalog's recommendation, the file's values, then localllm's defaults.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm import paths
from localllm.cli.serve.served_models import own_sampling
from localllm.engine.messages import Sampling
from localllm.library.catalog import load_catalog
from localllm.load.load_plan import load_plan_named
from localllm.settings import Settings
from models.tiny_gguf import write_llama
from support.own_server import background_server

ASKED = {"prompt": "hello", "n_predict": 12, "ignore_eos": True, "cache_prompt": False}


@contextmanager
def serving(path: Path) -> Iterator[httpx.Client]:
    """Run `localllm serve PATH` in a process, and yield a client."""
    with tempfile.TemporaryDirectory(prefix="ll") as folder:
        address = Path(folder) / "s.sock"
        command = [sys.executable, "-m", "localllm", "serve", str(path), "--unix", str(address)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("serving on"):
                    break
            assert said[-1].startswith("serving on"), said
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(address)), base_url="http://localllm"
            ) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def unasked(client: httpx.Client) -> dict[str, Any]:
    params: dict[str, Any] = client.get("/props").json()["default_generation_settings"]["params"]
    return params


def stated(params: dict[str, Any]) -> tuple[float, ...]:
    return tuple(
        params[name] for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
    )


def answers(client: httpx.Client, **more: Any) -> set[str]:
    return {client.post("/completion", json={**ASKED, **more}).json()["content"] for _ in range(4)}


def test_serve_uses_the_makers_sampling_for_a_catalog_model(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "Qwen3-0.6B-Q4_K_M.gguf")
    maker = load_catalog().by_id["qwen3-0.6b"].sampling
    assert (maker.temperature, maker.top_k, maker.min_p) == (0.6, 20, 0.0)
    with serving(path) as client:
        assert stated(unasked(client)) == (0.6, 0.95, 20, 0.0, 1.0)


def test_serve_uses_the_sampling_in_a_files_header_unless_the_request_sets_its_own(
    tmp_path: Path,
) -> None:
    header = {"temp": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.02, "penalty_repeat": 1.05}
    with serving(write_llama(tmp_path / "nobody-knows-it.gguf", sampling=header)) as client:
        assert stated(unasked(client)) == (0.7, 0.9, 1, 0.02, 1.05)
        # One candidate gives one answer. With more candidates, these random weights give nearly as
        # many answers as there are requests.
        assert len(answers(client)) == 1
        assert len(answers(client, top_k=0, temperature=1.5, top_p=1, min_p=0)) > 1


def test_the_chat_uses_the_sampling_in_a_files_header_too(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "nobody-knows-it.gguf", sampling={"temp": 0.7, "top_k": 1})
    with (
        background_server(str(path), 512) as engine,
        httpx.Client(
            base_url=engine.base_url.removesuffix("/v1"),
            headers={"authorization": f"Bearer {engine.api_key}"},
        ) as client,
    ):
        assert stated(unasked(client)) == (0.7, 0.95, 1, 0.05, 1.0)
        assert len(answers(client)) == 1


def test_an_unknown_file_without_sampling_gets_the_defaults(tiny_model: Path) -> None:
    assert own_sampling(load_plan_named(str(tiny_model), Settings()).plan) == Sampling()


def test_the_users_catalog_overrides_the_catalog_and_the_catalog_the_file(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "Qwen3-0.6B-Q8_0.gguf", sampling={"temp": 0.1, "top_k": 3})
    assert own_sampling(load_plan_named(str(path), Settings()).plan) == Sampling(
        temperature=0.6, top_k=20, min_p=0.0
    )
    own = paths.config_dir() / "models"
    own.mkdir(parents=True)
    (own / "mine.toml").write_text(
        '[[models]]\nid = "qwen3-0.6b"\nsampling = { temperature = 0.4 }\n'
    )
    assert own_sampling(load_plan_named(str(path), Settings()).plan) == Sampling(
        temperature=0.4, top_k=20, min_p=0.0
    )


def test_the_catalog_has_sampling_for_answers_without_reasoning(tmp_path: Path) -> None:
    plan = load_plan_named(str(write_llama(tmp_path / "Qwen3-0.6B-Q8_0.gguf")), Settings()).plan
    assert own_sampling(plan) == Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0)
    assert own_sampling(plan, thinks=False) == Sampling(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.0
    )


def test_the_file_supplies_sampling_that_the_catalog_lacks(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "SmolLM2-135M-Instruct-Q8_0.gguf", sampling={"top_k": 9, "temp": 1.9}
    )
    known = load_catalog().recognise(path.name)
    assert known is not None
    assert (known.sampling.temperature, known.sampling.top_k) == (0.7, None)
    assert own_sampling(load_plan_named(str(path), Settings()).plan) == Sampling(
        temperature=0.7, top_k=9, min_p=0.01
    )


@pytest.mark.parametrize(
    "odd", [{"temp": -1.0}, {"temp": float("nan")}, {"top_p": 7.5}, {"top_k": -4}]
)
def test_invalid_sampling_in_a_header_is_ignored(tmp_path: Path, odd: dict[str, float]) -> None:
    path = write_llama(tmp_path / "odd.gguf", sampling=odd)
    assert own_sampling(load_plan_named(str(path), Settings()).plan) == Sampling()


def test_the_sampling_of_an_mlx_folder_comes_from_its_generation_config(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from models.tiny_mlx import write_llama as write_folder

    folder = tmp_path / "tiny-mlx"
    folder.mkdir()
    write_folder(folder)
    stated_by = folder / "generation_config.json"
    stated_by.write_text(
        json.dumps({"temperature": 0.65, "top_k": 33, "repetition_penalty": 1.1, "eos_token_id": 2})
    )
    expected = Sampling(temperature=0.65, top_k=33, repeat_penalty=1.1)
    assert own_sampling(load_plan_named(str(folder), Settings()).plan) == expected
    stated_by.write_text("[]")
    assert own_sampling(load_plan_named(str(folder), Settings()).plan) == Sampling()
