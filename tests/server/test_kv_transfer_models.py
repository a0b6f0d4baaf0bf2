"""KV of every kind of memory is transferred: windows, recurrent states, M-RoPE, MLX.

KV is never transferred between different engines. Prompts with images are prefilled locally.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.http.accounts import NamedKey, digest_of
from localllm_backends.contract import LoadSpec, LoraAdapter, Placement
from localllm_backends.mlx import backend_type as mlx
from models import tiny_gguf, tiny_lora, tiny_mlx, tiny_mlx_vision
from models.tiny_vision import write_vision
from server.test_kv_transfer import (
    MAC,
    PATIENCE_S,
    ask,
    asking,
    fallbacks,
    loaded_server,
    metric,
    text,
    worker,
)
from support.pictures import needs_mlx_vlm, needs_mtmd, needs_pillow, png

KEYS = (NamedKey("mac", digest_of(MAC.encode()), kv=True),)
NO_MLX = pytest.mark.skipif(mlx.available() is not None, reason="MLX is not installed")
MLX = [pytest.mark.mlx, NO_MLX]


def prompt(seed: int, n: int = 600) -> list[int]:
    return [5 + (seed * 31 + i * 7 + i * i % 11) % 200 for i in range(n)]


def write_m_rope(path: Path) -> Path:
    """Write a model whose positions have three dimensions."""
    return write_vision(path.parent, "qwen2vl").text


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(tiny_gguf.write_sliding, id="windows"),
        pytest.param(tiny_gguf.write_hybrid, id="recurrent and attention"),
        pytest.param(write_m_rope, id="M-RoPE"),
        pytest.param(tiny_mlx.write_llama, id="mlx", marks=MLX),
        pytest.param(tiny_mlx.write_sliding, id="mlx windows", marks=MLX),
        pytest.param(tiny_mlx.write_hybrid, id="mlx recurrent and attention", marks=MLX),
        pytest.param(tiny_mlx.write_recurrent, id="mlx recurrent", marks=MLX),
    ],
)
def test_every_kind_of_memory_is_transferred(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    with (
        loaded_server(worker(path), keys=KEYS) as sender,
        asking(path, sender.url) as here,
    ):
        for seed in range(3):
            asked = prompt(seed)
            answer = ask(here, asked)
            assert text(answer) == text(ask(sender, asked, cache_prompt=False))
            assert "599 tokens were read by" in answer.headers["x-localllm-cache"]
        assert fallbacks(here) == {}
        longer = [*prompt(0), 9, 8, 7]
        assert text(ask(here, longer)) == text(ask(sender, longer, cache_prompt=False))
        assert metric(here, "kv_fetched_tokens_total") == 3 * 599


def test_an_8_bit_cache_takes_about_half_the_link(few_layers: Path) -> None:
    """An 8-bit KV cache takes about half the bytes of a 16-bit one.

    Both servers keep the KV as it is sent, so a transfer adds no error.
    """
    spec = LoadSpec(str(few_layers), n_ctx=2048, n_seq_max=4)
    sent_bytes = {}
    for kv_type in ("f16", "q8_0"):
        typed = replace(spec, kv_type_k=kv_type, kv_type_v=kv_type)
        with loaded_server(Supervisor(WorkerOptions(typed)), keys=KEYS) as sender:
            engine = {
                "prefill_from": [sender.url],
                "prefill_key": MAC,
                "prefill_from_tokens": 256,
                "prefill_patience_s": PATIENCE_S,
                "model_name": "few",
            }
            with loaded_server(Supervisor(WorkerOptions(typed, engine=engine))) as here:
                answer = ask(here, prompt(1))
                assert "599 tokens were read by" in answer.headers["x-localllm-cache"]
                assert text(answer) == text(ask(sender, prompt(1)))
                sent_bytes[kv_type] = metric(here, "kv_fetched_bytes_total")
    # 34 bytes for 32 values, plus positions.
    assert 0.52 < sent_bytes["q8_0"] / sent_bytes["f16"] < 0.56


def test_kv_is_computed_by_the_adapters_of_the_request_or_not_transferred(tmp_path: Path) -> None:
    """KV is transferred only if it was computed with the request's adapters.

    The other server has one of the two adapters, at another index.
    """
    path = tiny_gguf.write_llama(tmp_path / "model.gguf")
    loaded = [
        LoraAdapter(str(tiny_lora.write(tmp_path / f"{i}.gguf", path, seed=i)), 0.0)
        for i in range(3)
    ]
    first, second, other = loaded
    with (
        loaded_server(worker(path, other, second), keys=KEYS) as sender,
        asking(path, sender.url, adapters=(first, second)) as here,
        asking(path, adapters=(first, second)) as alone,
    ):
        texts = set()
        for number, comes_from in ((1, "599 tokens were read by"), (0, "0/600 tokens")):
            chosen = [{"id": number, "scale": 1.0}]
            answer = ask(here, prompt(7), lora=chosen)
            assert comes_from in answer.headers["x-localllm-cache"]
            assert text(answer) == text(ask(alone, prompt(7), lora=chosen))
            texts.add(text(answer))
        assert fallbacks(here) == {"refused": 1}
        assert len(texts) == 2, "equal answers would prove nothing"


def llamacpp_that_sees(folder: Path) -> tuple[Path, Path]:
    model = write_vision(folder, "qwen2vl")
    return model.text, model.projector


def mlx_that_sees(folder: Path) -> tuple[Path, Path]:
    model = tiny_mlx_vision.write(folder / "sees", "qwen2_5_vl")
    return model, model


@needs_pillow()
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(llamacpp_that_sees, id="llama.cpp", marks=needs_mtmd()),
        pytest.param(mlx_that_sees, id="mlx", marks=[pytest.mark.mlx, needs_mlx_vlm()]),
    ],
)
def test_only_prompts_without_images_are_transferred(
    write: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    """A prompt with an image is prefilled locally; a prompt of text is transferred.

    The other server does not have the pixels. Positions of these models have three dimensions
    (M-RoPE).
    """
    text_model, projector = write(tmp_path)
    spec = LoadSpec(
        str(text_model),
        n_ctx=2048,
        n_seq_max=4,
        placement=Placement(gpu_layers=0),
        projector=str(projector),
    )

    def seeing(**engine: Any) -> Supervisor:
        return Supervisor(WorkerOptions(spec, engine=engine))

    picture = base64.b64encode(png(64, 64, 1)).decode()
    words = "many words of a long question " * 30
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    message = {"role": "user", "content": [{"type": "text", "text": words}, shown]}
    body = {"model": "few", "messages": [message], "temperature": 0, "max_tokens": 8}
    with loaded_server(seeing(), keys=KEYS) as sender:
        engine = {"prefill_from": [sender.url], "prefill_key": MAC, "prefill_from_tokens": 256}
        here = seeing(**engine, model_name="few", prefill_patience_s=PATIENCE_S)
        with loaded_server(here) as asking_server:
            url = asking_server.url + "/v1/chat/completions"
            answer = httpx.post(url, json=body, trust_env=False, timeout=120)
            assert answer.status_code == 200, answer.text
            assert "read by" not in answer.headers["x-localllm-cache"]
            message["content"] = "other words, then " + words
            answer = httpx.post(url, json=body, trust_env=False, timeout=120)
            assert "tokens were read by" in answer.headers["x-localllm-cache"]
            there = httpx.post(
                sender.url + "/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {MAC}"},
                trust_env=False,
                timeout=120,
            )
            assert answer.json()["choices"] == there.json()["choices"]
