"""Libraries and frameworks. Each is a script in ../sdk that gives the same three tools to the
library's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.agent import Agent, Place
from benchmarks.clients.brain import TASK, Offered, Worker

_SCRIPTS = Path(__file__).parents[1] / "sdk"
_ENVIRONMENT = ("LOCALLLM_URL", "LOCALLLM_MODEL", "LOCALLLM_TASK")


class Forms(Worker):
    """Fills in the form that instructor requests with a forced call."""

    def __call__(self, prompt: str) -> list[str]:
        """Return the call, its JSON, and its arguments alone."""
        self.steps.append("answer")
        arguments = '{"name": "grey heron", "weight_mg": 1500000}'
        call = self.notation.write(
            "", "", [("Bird", {"name": "grey heron", "weight_mg": 1_500_000})]
        )
        return [call, f'{{"name": "Bird", "arguments": {arguments}}}', arguments]


class Finishing(Worker):
    """Ends with a call of the tool that returns the final answer."""

    def calls(self, prompt: str, tools: Sequence[Offered]) -> list[tuple[str, dict[str, Any]]]:
        """Return the usual calls, then the final one."""
        usual = super().calls(prompt, tools)
        last = next((t for t in tools if t.name == "final_answer"), None)
        if usual or last is None:
            return usual
        self.steps.append("answer")
        return [(last.name, {"answer": "All done: the file has another bird now."})]


def _python(place: Place, script: str) -> list[str]:
    return [str(place.program / "bin/python"), str(_SCRIPTS / script)]


def _node(place: Place, script: str) -> list[str]:
    # Node searches for packages next to the script.
    copied = place.program / "scripts"
    copied.mkdir(exist_ok=True)
    for file in _SCRIPTS.glob("*.mjs"):
        (copied / file.name).write_text(file.read_text())
    return ["node", str(copied / script)]


def _settings(place: Place) -> Mapping[str, str]:
    return dict(zip(_ENVIRONMENT, (place.target.url, place.target.model, TASK), strict=True))


def _library(
    name: str,
    package: str,
    version: str,
    script: str,
    *also: str,
    run: Callable[[Place, str], list[str]] = _python,
    **more: Any,
) -> Agent:
    def command(place: Place) -> list[str]:
        return ["env", *(f"{k}={v}" for k, v in _settings(place).items()), *run(place, script)]

    return Agent(
        name,
        "pip" if run is _python else "npm",
        package,
        version,
        command,
        also=also,
        limit_s=60.0,
        n_ctx=16_384,
        **more,
    )


_AI = ("ai@7.0.173", "zod@4.6.7")
# The packages of litellm's extra `proxy`, without one that no index has.
_PROXY = (
    "uvicorn", "gunicorn", "uvloop", "fastapi", "starlette", "backoff", "rq", "orjson",
    "apscheduler", "pyjwt", "python-multipart", "cryptography", "websockets", "rich",
    "fastapi-sso", "boto3", "mcp", "semver", "expression", "soundfile",
)  # fmt: skip
# The frameworks call the server through this package.
_OPENAI = "openai==3.57.0"

AGENTS = (
    _library("openai chat", "openai", "3.57.0", "openai_chat.py"),
    _library("openai responses", "openai", "3.57.0", "openai_responses.py"),
    _library("anthropic", "anthropic", "2.14.0", "anthropic_messages.py"),
    _library("ollama", "ollama", "0.6.3", "ollama_chat.py"),
    _library("openai.js chat", "openai", "7.59.0", "openai_chat.mjs", *_AI, run=_node),
    _library("openai.js responses", "openai", "7.59.0", "openai_responses.mjs", *_AI, run=_node),
    _library(
        "@anthropic-ai/sdk",
        "@anthropic-ai/sdk",
        "1.14.0",
        "anthropic_messages.mjs",
        *_AI,
        run=_node,
    ),
    _library("ollama.js", "ollama", "0.6.4", "ollama_chat.mjs", *_AI, run=_node),
    _library("@ai-sdk/openai", "@ai-sdk/openai", "4.0.118", "ai_openai.mjs", *_AI, run=_node),
    _library("@ai-sdk/openai chat", "@ai-sdk/openai", "4.0.118", "ai_chat.mjs", *_AI, run=_node),
    _library(
        "@ai-sdk/openai-compatible",
        "@ai-sdk/openai-compatible",
        "3.0.92",
        "ai_compatible.mjs",
        *_AI,
        run=_node,
    ),
    _library(
        "@ai-sdk/anthropic", "@ai-sdk/anthropic", "4.0.105", "ai_anthropic.mjs", *_AI, run=_node
    ),
    _library(
        "langchain-openai",
        "langchain-openai",
        "1.7.4",
        "langchain_openai_agent.py",
        "langgraph==1.2.24",
    ),
    _library(
        "langchain-ollama",
        "langchain-ollama",
        "1.1.0",
        "langchain_ollama_agent.py",
        "langgraph==1.2.24",
    ),
    _library("litellm", "litellm", "1.110.2", "litellm_chat.py", *_PROXY),
    _library("litellm proxy", "litellm", "1.110.2", "litellm_proxy.py", *_PROXY),
    _library("pydantic-ai", "pydantic-ai-slim", "2.68.0", "pydantic_ai_agent.py", _OPENAI),
    _library("openai-agents", "openai-agents", "0.24.0", "openai_agents.py"),
    _library(
        "smolagents", "smolagents", "1.26.0", "smolagents_agent.py", _OPENAI, worker=Finishing
    ),
    _library("instructor", "instructor", "1.17.0", "instructor_form.py", edits=False, worker=Forms),
)
