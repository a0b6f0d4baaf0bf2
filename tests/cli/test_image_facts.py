"""The catalog's facts about images: tokens per image, and projectors.

`recommend --sees` counts the bytes of the projectors.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.library.catalog import load_catalog
from localllm.load.candidates import audio_readers, device_named, image_readers
from localllm.planner import memory
from localllm.planner.projector import listed_bytes
from localllm.planner.starting_settings import Overrides, settings_for
from localllm.planner.types import Workload
from localllm_catalog.catalog import Catalog
from localllm_catalog.types import ImageTokens


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_models_info_shows_the_tokens_of_an_image() -> None:
    fixed, sized, blind = (
        run("models", "info", name) for name in ("gemma-3-4b-it", "qwen3-vl-8b", "qwen3-8b")
    )
    assert "256 tokens an image, whatever its size" in fixed
    assert (
        "a token for 32 × 32 pixels, 8 to 4,096 an image; "
        "mmproj-Qwen3VL-8B-Instruct-Q8_0.gguf, "
        "0.8 GB"
    ) in sized
    assert "image" not in blind
    told = json.loads(run("models", "info", "qwen3-vl-8b", "--json"))["model"]
    assert told["image_tokens"] == {"least": 8, "most": 4096, "side_px": 32}
    assert told["variants"][0]["mmproj_bytes"] == 752_289_728


def test_recommended_plans_count_the_projector() -> None:
    machine = ("--device", "RTX 4090", "--json")
    for plan in json.loads(run("recommend", "--sees", *machine))["plans"]:
        assert plan["variant"]["format"] == "gguf"
        assert plan["memory"]["mmproj_bytes"] > 10**8
    one = json.loads(run("recommend", "-m", "qwen3-vl-8b", *machine))["plans"][0]["memory"]
    seeing = json.loads(run("recommend", "-m", "qwen3-vl-8b", "--sees", *machine))["plans"][0][
        "memory"
    ]
    assert one["mmproj_bytes"] == 0
    assert seeing["mmproj_bytes"] >= 752_289_728
    assert seeing["total_bytes"] - one["total_bytes"] == seeing["mmproj_bytes"]
    shown = run("recommend", "--sees", "--plain", "--device", "RTX 4090")
    assert "GB for the projector" in shown
    assert "projector" in run("recommend", "--sees", "--explain", "--device", "RTX 4090")


def test_models_that_read_sounds_are_listed_with_their_projector(catalog: Catalog) -> None:
    machine = ("--device", "RTX 4090")
    plans = json.loads(run("recommend", "--hears", *machine, "--json"))["plans"]
    assert plans
    for plan in plans:
        assert plan["variant"]["format"] == "gguf"
        assert plan["memory"]["mmproj_bytes"] > 10**8
    assert "images and sounds: " in run("recommend", "--hears", "--plain", *machine)
    heard = {model.id for model in audio_readers(catalog.models)}
    assert "gemma-4-e4b-it" in heard
    assert "qwen3-vl-8b-instruct" not in heard


def test_mlx_folders_with_supported_vision_encoders_are_recommended_for_images(
    catalog: Catalog,
) -> None:
    formats = {m.id: {v.format for v in m.variants} for m in image_readers(catalog.models)}
    assert formats["qwen3.5-4b"] == formats["gemma-3-4b-it"] == {"gguf", "mlx"}
    # It has no vision tower: its patches go directly into the model.
    assert formats["gemma-4-12b-it"] == {"gguf"}
    assert "qwen3-8b" not in formats
    plans = json.loads(run("recommend", "--sees", "--device", "M4 Max 64GB", "--json"))["plans"]
    assert "mlx" in {plan["backend"] for plan in plans}
    assert all(plan["memory"]["mmproj_bytes"] > 5e7 for plan in plans)


def test_every_model_that_reads_images_has_a_projector_size(catalog: Catalog) -> None:
    for model in image_readers(catalog.models):
        for variant in model.variants:
            assert 5e7 < listed_bytes(model, variant) < 2e10, (model.id, variant.quant)
    text_only = catalog.get("qwen3-8b")
    assert text_only is not None
    assert listed_bytes(text_only, text_only.variants[0]) == 0


@pytest.mark.parametrize("name", ["RTX 4090", "M4 Max 64GB", "2x RTX 3090", "RTX 3060 12GB"])
def test_the_projectors_bytes_are_counted_once_on_every_machine(
    name: str, catalog: Catalog
) -> None:
    device, model = device_named(name, None, None), catalog.get("qwen3-vl-8b-instruct")
    assert model is not None
    variant = model.variants[0]
    need, plain = (
        memory.need(
            model,
            variant,
            settings_for(device, model, variant, Workload(), Overrides(sees=sees)),
            device,
        )
        for sees in (True, False)
    )
    added = need.total_bytes + need.host_bytes - plain.total_bytes - plain.host_bytes
    assert added == listed_bytes(model, variant)
    assert sum(need.cards_bytes) - sum(plain.cards_bytes) == (added if need.cards_bytes else 0)


def test_the_rule_for_image_tokens_is_described_in_words() -> None:
    assert str(ImageTokens(256, 256)) == "256 tokens an image, whatever its size"
    assert str(ImageTokens(8, 1024, 28)) == "a token for 28 × 28 pixels, 8 to 1,024 an image"
