"""Runs the curl and Python examples of the API pages against a server with a scripted model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.engine.messages import Request
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "api.md", *sorted((DOCS / "api").glob("*.md"))]
ADDRESS = "http://localhost:11535"
# The examples of this page need an embedding model or a reranker; test_embeddings.py,
# test_rerank.py and test_systemone.py test its routes.
UNTRIED = "scoring.md"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PLACE = '{"city": "Paris", "country": "France"}'
# Text in the output of each page's examples; an answer of the model if the page is not listed.
PRINTED = {
    "errors.md": "no-such-model",
    "security.md": "qwen3-8b",
    "serving.md": "qwen3-8b",
}
ANSWERS = re.compile(r"Hello world!|Oslo|Paris|\d")


def examples() -> Iterator[tuple[str, str, str]]:
    """Yield the page, language and text of each example."""
    for page in PAGES:
        blocks = re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        yield from ((page.name, language, text) for language, text in blocks)


EXAMPLES = [*examples()]
TRIED = [
    pytest.param(*example, id=f"{example[0]}-{number}-{example[1]}")
    for number, example in enumerate(EXAMPLES)
    if example[0] != UNTRIED
]


def script(request: Request) -> list[str]:
    """Call the tool or fill the schema if the example asks for one."""
    if "Oslo" in str(request.prompt):
        return [CALL]
    return [PLACE] if "Eiffel" in str(request.prompt) else ["Hello", " world", "!"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"qwen3-8b": ScriptedEngine(script)}) as running:
        yield running


def test_every_dialect_has_an_example_in_curl_and_in_python() -> None:
    shown = {(page, language) for page, language, _ in EXAMPLES}
    for page in ("api", "openai", "responses", "anthropic", "ollama", "llamacpp", "tools"):
        assert {(f"{page}.md", "sh"), (f"{page}.md", "python")} <= shown


@pytest.mark.parametrize(("page", "language", "text"), TRIED)
def test_the_example_works(server: Running, page: str, language: str, text: str) -> None:
    assert ADDRESS in text
    command = {"sh": ["bash", "-ec"], "python": [sys.executable, "-c"]}[language]
    done = subprocess.run(
        [*command, text.replace(ADDRESS, server.url)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_PROXY": "*"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED.get(page, ANSWERS), done.stdout), done.stdout
    assert '"error":{' not in done.stdout or page == "errors.md", done.stdout
