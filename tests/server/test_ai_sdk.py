"""The AI SDK works with every dialect that it supports.

The tests cover text, reasoning, tools, structured output, streams, cancellation and a full
context. The SDK rejects an answer that does not match its schemas.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.messages import Request
from server.test_thinking_budget import OWN
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine, Step
from support.until import until

# A folder where npm has installed ai, zod and the three providers, in the versions of
# benchmarks/clients/agents.
_PACKAGES = os.environ.get("LOCALLLM_AI_SDK", "")
_SCRIPT = Path(__file__).parents[2] / "benchmarks/clients/sdk/ai_every_way.mjs"
_CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
_DIALECTS = ("openai chat", "openai responses", "openai-compatible", "anthropic")
_BIRD = {"name": "heron", "weight_mg": 5}

pytestmark = pytest.mark.skipif(
    not _PACKAGES or not shutil.which("node"),
    reason="set LOCALLLM_AI_SDK to a folder where npm installed the AI SDK, with node on the path",
)


def _script(request: Request) -> Sequence[Step]:
    said = str(request.prompt)
    if "endless" in said:
        return ["<think>hm</think>", "and so on", Gate()]
    if "form" in said:
        return ["<think>hm</think>", '{"name": "heron", ', '"weight_mg": 5}']
    calls = [_CALL] if "look" in said and "seen x" not in said else []
    return ["<think>hm</think>", "Hello", " world", *calls]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(_script, chat_template=OWN)


@pytest.fixture(scope="module")
def came_to(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the script, and return its results by dialect and case."""
    # node looks for packages in the folders above the script
    folder = tmp_path_factory.mktemp("ai")
    (folder / "node_modules").symlink_to(Path(_PACKAGES) / "node_modules")
    script = shutil.copy(_SCRIPT, folder)
    with running_server({"tiny": engine}) as server:
        more = {"LOCALLLM_URL": server.url, "LOCALLLM_MODEL": "tiny"}
        said = subprocess.run(
            ["node", script],
            env={**os.environ, **more},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        until(lambda: engine.running == 0)
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    return {f"{line['dialect']} {line['way']}": line["got"] for line in lines}


@pytest.mark.parametrize("dialect", _DIALECTS)
@pytest.mark.parametrize("way", ["whole", "stream"])
def test_the_ai_sdk_reads_texts_and_reasoning(
    came_to: dict[str, Any], dialect: str, way: str
) -> None:
    got = came_to[f"{dialect} {way}"]
    assert (got["text"], got["reason"]) == ("Hello world", "stop")
    assert got["output_tokens"] > 0
    # OpenAI's chat completions have no reasoning, so the SDK's OpenAI provider reads none
    assert got.get("reasoning") == (None if dialect == "openai chat" else "hm")


@pytest.mark.parametrize("dialect", _DIALECTS)
@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_the_ai_sdk_reads_tool_calls_and_structured_output(
    came_to: dict[str, Any], dialect: str, way: str
) -> None:
    got = came_to[f"{dialect} {way} tools"]
    assert (got["text"], got["seen"], got["reason"]) == ("Hello world", ["seen x"], "stop")
    assert came_to[f"{dialect} {way} form"] == _BIRD


def test_an_aborted_call_of_the_ai_sdk_cancels_its_request(
    came_to: dict[str, Any], engine: ScriptedEngine
) -> None:
    assert all(came_to[f"{dialect} abort"] == {"aborted": True} for dialect in _DIALECTS)
    assert len(engine.cancelled) == len(_DIALECTS)


@pytest.mark.parametrize("dialect", _DIALECTS)
def test_the_ai_sdk_gets_a_400_for_a_full_context(came_to: dict[str, Any], dialect: str) -> None:
    got = came_to[f"{dialect} overflow"]
    assert got["status"] == 400
    assert "4096" in got["said"]
