"""Ollama's names of models that the catalog has."""

from __future__ import annotations

import pytest

from localllm.library.catalog import load_catalog
from localllm.library.installed_names import catalog_model


@pytest.mark.parametrize(
    ("typed", "model_id", "quant"),
    [
        ("llama3.3:70b", "llama-3.3-70b-instruct", ""),
        ("llama3.3", "llama-3.3-70b-instruct", ""),
        ("llama3.2:3b-instruct-q4_K_M", "llama-3.2-3b-instruct", "Q4_K_M"),
        ("llama3.1:8b", "llama-3.1-8b-instruct", ""),
        ("qwen3:30b-a3b", "qwen3-30b-a3b", ""),
        ("qwen3:30b", "qwen3-30b-a3b", ""),
        ("qwen3:8b", "qwen3-8b", ""),
        ("qwen3.6:35b", "qwen3.6-35b-a3b", ""),
        ("qwen3-coder:30b", "qwen3-coder-30b-a3b-instruct", ""),
        ("gemma3:27b", "gemma-3-27b-it", ""),
        ("gemma4:26b", "gemma-4-26b-a4b-it", ""),
        ("gpt-oss:20b", "gpt-oss-20b", ""),
        ("phi4", "phi-4", ""),
        ("deepseek-r1:8b", "deepseek-r1-0528-qwen3-8b", ""),
        ("nemotron-3-nano:30b", "nemotron-3-nano-30b-a3b", ""),
        ("mistral-small3.2:24b", "mistral-small-3.2-24b", ""),
        ("qwen3-8b:Q8_0", "qwen3-8b", "Q8_0"),
    ],
)
def test_an_ollama_library_name_selects_the_catalogs_model(
    typed: str, model_id: str, quant: str
) -> None:
    model, asked = catalog_model(typed, load_catalog())
    assert model is not None
    assert (model.id, asked) == (model_id, quant)


@pytest.mark.parametrize(
    "typed", ["llama3.2", "gpt-oss", "qwen3:7b", "llama3.3:8b", "gemma3:1000b"]
)
def test_an_ollama_name_without_one_catalog_model_selects_none(typed: str) -> None:
    model, _ = catalog_model(typed, load_catalog())
    assert model is None
