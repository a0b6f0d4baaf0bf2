"""The curl and Python examples of the API pages run against a server with a scripted model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.cli.serve.model_router import router_for
from localllm.engine.messages import Request
from localllm.load.fit_several_models import load_plans_together
from localllm.settings import Settings
from models.tiny_bert import write_bert
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "api.md", *sorted((DOCS / "api").glob("*.md"))]
ADDRESS = "http://localhost:11535"
# The examples of this page run against a chat model, an embedding model and a reranker.
SCORING = "scoring.md"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PLACE = '{"city": "Paris", "country": "France"}'
# Text in the output of each page's examples. An unlisted page prints the model's answer.
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


@pytest.fixture(scope="module")
def scoring(few_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server with the models that the page on scoring needs."""
    folder = tmp_path_factory.mktemp("scoring")
    models = [
        few_layers,
        write_bert(folder / "nomic-embed-text-v1.5.gguf"),
        write_bert(folder / "ranker.gguf", pooling=4),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "DATA", "CACHE", "LOG"):
            patch.setenv(f"LOCALLLM_{name}_DIR", str(tmp_path_factory.mktemp(name.lower())))
        router = router_for(load_plans_together([str(path) for path in models], Settings()))
    with running_server(router) as running:
        yield running


def test_every_dialect_has_an_example_in_curl_and_in_python() -> None:
    shown = {(page, language) for page, language, _ in EXAMPLES}
    for page in ("api", "openai", "responses", "anthropic", "ollama", "llamacpp", "tools"):
        assert {(f"{page}.md", "sh"), (f"{page}.md", "python")} <= shown


@pytest.mark.parametrize(("page", "language", "text"), TRIED)
def test_every_example_of_the_api_pages_runs(
    request: pytest.FixtureRequest, page: str, language: str, text: str
) -> None:
    server = request.getfixturevalue("scoring" if page == SCORING else "server")
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
