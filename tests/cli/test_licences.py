"""`localllm licences` lists every package of a normal install and every model of the catalog."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.library.catalog import load_catalog

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_dependency_and_every_model_is_listed_with_its_licence() -> None:
    said = json.loads(CliRunner().invoke(app, ["licences", "--models", "--json"]).stdout)
    known = {row["name"].replace("_", "-").lower(): row["licence"] for row in said["libraries"]}
    assert {line.partition(">=")[0] for line in PROJECT["dependencies"]} <= set(known)
    extras = [
        extra
        for name, extra in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "docs", "test")
    ]
    running = {re.split(r"[\[><=;]", line)[0] for extra in extras for line in extra}
    assert {name for name in running if _installed(name)} <= set(known)
    assert known["localllm"] == "Apache-2.0"
    assert "pytest" not in known
    assert not [name for name, licence in known.items() if not licence]
    assert {row["name"] for row in said["models"]} == {
        model.name for model in load_catalog().models
    }


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_licences_without_models_lists_only_the_libraries() -> None:
    lines = CliRunner().invoke(app, ["licences"]).stdout.splitlines()
    assert any(line.split()[0] == "uvicorn" and "BSD" in line for line in lines)
    assert not any("Qwen" in line for line in lines)
