"""The chat's requests to the starter model.

They have a short prompt of their own, unless config.toml has a table for this model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx

from localllm.cli.chat.own_server import OwnEngine, loaded
from localllm.library import starter
from localllm.settings import Settings


def listed() -> Any:
    with loaded(OwnEngine("starter", Settings())) as engine:
        head = {"Authorization": f"Bearer {engine.api_key}"}
        models = httpx.get(f"{engine.base_url}/models", headers=head).json()["data"]
    [model] = [model for model in models if model["id"] == starter.NAME]
    return model


def test_the_chat_asks_the_starter_for_short_answers() -> None:
    model = listed()
    assert model["has_system"]
    assert model["sampling"]["temperature"] == 0.2


def test_a_table_for_the_starter_in_config_replaces_its_defaults() -> None:
    folder = Path(os.environ["LOCALLLM_CONFIG_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f'[models."{starter.NAME}"]\ntemperature = 0.9\n')
    model = listed()
    assert not model["has_system"]
    assert model["sampling"]["temperature"] == 0.9
