"""The API pages document every path and every field of the server."""

from __future__ import annotations

import re
from pathlib import Path

from localllm.conversation.tools.prompt import INSTRUCTION
from localllm.server.app import create_app
from localllm.server.dialects.known import HINTS, REFUSED
from localllm.server.dialects.openai.chat import ChatFields
from localllm.server.models.router import ModelRouter
from support.scripted_engine import ScriptedEngine

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join(
    page.read_text(encoding="utf-8")
    for page in [DOCS / "api.md", *sorted((DOCS / "api").glob("*.md"))]
)


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"[a-z_]{1,40}", PAGE))
    wanted = {*ChatFields.model_fields, *REFUSED, *HINTS} - {
        "length_penalty",
        "messages",
        "tools",
        "stream_options",
        "stream",
    }
    assert wanted - named == set()


def test_every_path_is_documented() -> None:
    app = create_app(ModelRouter({"tiny": ScriptedEngine()}))
    for path in app.state.document()["paths"]:
        short = path.partition("/{")[0].rsplit("/", 1)[-1]
        assert short in PAGE, path


def test_every_body_is_described_by_the_fields_its_path_reads() -> None:
    document = create_app(ModelRouter({"tiny": ScriptedEngine()})).state.document()
    for path, own in {
        "/v1/completions": "suffix",
        "/completion": "n_probs",
        "/infill": "input_extra",
    }.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]["$ref"]
        assert own in document["components"]["schemas"][body.rpartition("/")[2]]["properties"], path


def test_the_default_tool_format_is_the_documented_one() -> None:
    for line in (
        INSTRUCTION.replace("{{", "{")
        .replace("}}", "}")
        .replace("{tools}", "{…one per line…}")
        .splitlines()
    ):
        assert f"    {line}" in PAGE
