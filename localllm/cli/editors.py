"""What each editor and agent needs to use this server: its configuration as data, and the calls it will make.

Sources: each program's own documentation (zed.dev/docs/ai, code.visualstudio.com/docs/agent-customization/language-models,
docs.continue.dev, opencode.ai/docs/providers, developers.openai.com/codex/config-advanced, aider.chat/docs,
docs.openwebui.com, llm.datasette.io), read in November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Probe = Literal["models", "chat", "tools", "responses", "anthropic", "ollama", "fim"]


@dataclass(frozen=True, slots=True)
class Target:
    """The server to connect to: `url` without a path, one model of it, its context in tokens, the key if any; and
    which of its models complete code and make embeddings, where it serves such."""

    url: str
    model: str
    n_ctx: int
    api_key: str | None = None
    autocomplete: str | None = None
    embedding: str | None = None

    @property
    def key(self) -> str:
        """The key, or the word clients get that insist on one."""
        return self.api_key or "local"

    @property
    def answer_tokens(self) -> int:
        """Room for an answer in clients that want input and output apart."""
        return max(256, min(8192, self.n_ctx // 4))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to write. `merge` is put into the JSON there, `text` is the whole of a file of our own."""

    path: Path
    merge: Mapping[str, Any] | None = None
    text: str | None = None
    merge_list_by: str = ""

    def shown(self) -> str:
        """What to write by hand."""
        return self.text if self.text is not None else json.dumps(self.merge, indent=2)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to connect one program: files, steps a person must take, and the calls it makes."""

    name: str
    files: tuple[ConfigFile, ...] = ()
    steps: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ("models", "chat")
    environment: Mapping[str, str] = field(default_factory=dict)


def zed(t: Target, home: Path) -> Recipe:
    """Zed: an OpenAI-compatible provider; the key comes from an environment variable."""
    model = {
        "name": t.model,
        "display_name": f"{t.model} (this machine)",
        "max_tokens": t.n_ctx,
        "max_output_tokens": t.answer_tokens,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"api_url": f"{t.url}/v1", "available_models": [model]}
    return Recipe(
        "Zed",
        (
            ConfigFile(
                home / ".config/zed/settings.json",
                {"language_models": {"openai_compatible": {"localllm": provider}}},
            ),
        ),
        ("Choose the model in the Agent Panel.",),
        ("chat", "tools"),
        {"LOCALLLM_API_KEY": t.key},
    )


def vscode(t: Target, home: Path) -> Recipe:
    """VS Code's Copilot Chat: a custom endpoint."""
    entry = {
        "name": "localllm",
        "vendor": "customendpoint",
        "apiKey": t.key,
        "apiType": "chat-completions",
        "models": [
            {
                "id": t.model,
                "name": f"{t.model} (this machine)",
                "url": f"{t.url}/v1/chat/completions",
                "toolCalling": True,
                "vision": False,
                "maxInputTokens": t.n_ctx - t.answer_tokens,
                "maxOutputTokens": t.answer_tokens,
            }
        ],
    }
    return Recipe(
        "VS Code",
        (ConfigFile(home / ".config/Code/User/chatLanguageModels.json", {"": [entry]}, merge_list_by="name"),),
        (
            "Run `Chat: Manage Language Models` and make the model visible.",
            f'Older releases have an Ollama provider: "github.copilot.chat.byok.ollamaEndpoint": "{t.url}".',
        ),
        ("models", "chat", "tools", "ollama"),
    )


def continue_(t: Target, home: Path) -> Recipe:
    """Continue: its YAML configuration, one entry per role where several models are served."""

    def entry(model: str, roles: str, *more: str) -> list[str]:
        return [
            f"  - name: {json.dumps(model)}",
            "    provider: openai",
            f"    model: {json.dumps(model)}",
            f"    apiBase: {t.url}/v1",
            f"    apiKey: {json.dumps(t.key)}",
            f"    roles: [{roles}]",
            *more,
        ]

    window = ("    defaultCompletionOptions:", f"      contextLength: {t.n_ctx}")
    roles = "chat, edit, apply, autocomplete" if t.autocomplete == t.model else "chat, edit, apply"
    lines = ["name: localllm", "version: 1.0.0", "schema: v1", "models:"]
    lines += entry(t.model, roles, "    capabilities: [tool_use]", *window)
    if t.autocomplete not in (None, t.model):
        lines += entry(str(t.autocomplete), "autocomplete")
    if t.embedding is not None:
        lines += entry(t.embedding, "embed")
    missing = (
        "For autocomplete, serve a model with fill-in-the-middle tokens too: `localllm serve MODEL --also FIM_MODEL`."
    )
    return Recipe(
        "Continue",
        (ConfigFile(home / ".continue/config.yaml", text="\n".join([*lines, ""])),),
        () if t.autocomplete else (missing,),
        ("chat", "tools"),
    )


def cline(t: Target, home: Path) -> Recipe:
    """Cline keeps its settings inside the editor."""
    return Recipe(
        "Cline",
        steps=(
            "In Cline's settings choose the provider `OpenAI Compatible`.",
            f"Base URL: {t.url}/v1",
            f"API key: {t.key}",
            f"Model ID: {t.model}",
            f"Context window: {t.n_ctx}",
        ),
        probes=("models", "chat", "tools", "ollama"),
    )


def opencode(t: Target, home: Path) -> Recipe:
    """opencode: a provider through the AI SDK."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "localllm",
        "options": {"baseURL": f"{t.url}/v1", "apiKey": t.key},
        "models": {t.model: {"name": t.model, "limit": {"context": t.n_ctx, "output": t.answer_tokens}}},
    }
    merge = {"$schema": "https://opencode.ai/config.json", "provider": {"localllm": provider}}
    return Recipe(
        "opencode",
        (ConfigFile(home / ".config/opencode/opencode.json", merge),),
        (f"Start with: opencode --model localllm/{t.model}",),
        ("chat", "tools"),
    )


def codex(t: Target, home: Path) -> Recipe:
    """Codex CLI: a profile file of our own, so the user's configuration stays as it is."""
    text = "\n".join(
        [
            f"model = {json.dumps(t.model)}",
            'model_provider = "localllm"',
            f"model_context_window = {t.n_ctx}",
            "",
            "[model_providers.localllm]",
            'name = "localllm"',
            f'base_url = "{t.url}/v1"',
            'wire_api = "responses"',
            *(['env_key = "LOCALLLM_API_KEY"'] if t.api_key else []),
            "",
        ]
    )
    return Recipe(
        "Codex CLI",
        (ConfigFile(home / ".codex/localllm.config.toml", text=text),),
        ("Start with: codex --profile localllm",),
        ("models", "responses"),
        {"LOCALLLM_API_KEY": t.api_key} if t.api_key else {},
    )


def claude(t: Target, home: Path) -> Recipe:
    """Claude Code: environment variables."""
    return Recipe(
        "Claude Code",
        steps=("Start it in a shell with these variables.",),
        probes=("anthropic",),
        environment={
            "ANTHROPIC_BASE_URL": t.url,
            "ANTHROPIC_AUTH_TOKEN": t.key,
            "ANTHROPIC_MODEL": t.model,
            "ANTHROPIC_SMALL_FAST_MODEL": t.model,
        },
    )


def aider(t: Target, home: Path) -> Recipe:
    """aider: the model's limits in its metadata file, the rest on the command line."""
    known = {
        f"openai/{t.model}": {
            "max_input_tokens": t.n_ctx,
            "max_output_tokens": t.answer_tokens,
            "max_tokens": t.answer_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    return Recipe(
        "aider",
        (ConfigFile(home / ".aider.model.metadata.json", known),),
        (f"Start with: aider --model openai/{t.model}",),
        ("chat",),
        {"OPENAI_API_BASE": f"{t.url}/v1", "OPENAI_API_KEY": t.key},
    )


def jetbrains(t: Target, home: Path) -> Recipe:
    """JetBrains AI Assistant: settings inside the IDE."""
    return Recipe(
        "JetBrains AI Assistant",
        steps=(
            "Settings > Tools > AI Assistant > Models: choose `OpenAI-compatible` (or `Ollama`).",
            f"URL: {t.url}/v1 (for Ollama: {t.url}); test the connection.",
            f"Choose {t.model} for the features you want; set the context window to {t.n_ctx}.",
        ),
        probes=("models", "chat", "ollama"),
    )


def open_webui(t: Target, home: Path) -> Recipe:
    """Open WebUI: environment variables, or its connection settings."""
    return Recipe(
        "Open WebUI",
        steps=("Or: Admin Settings > Connections > OpenAI API, with the same URL and key.",),
        probes=("models", "chat"),
        environment={"OPENAI_API_BASE_URL": f"{t.url}/v1", "OPENAI_API_KEY": t.key},
    )


def llm(t: Target, home: Path) -> Recipe:
    """The `llm` command: a list of extra OpenAI-compatible models."""
    text = "\n".join(
        [
            f"- model_id: {json.dumps('local/' + t.model)}",
            f"  model_name: {json.dumps(t.model)}",
            f"  api_base: {t.url}/v1",
            "  can_stream: true",
            "  supports_schema: true",
            "  supports_tools: true",
            "",
        ]
    )
    return Recipe(
        "llm",
        (ConfigFile(home / ".config/io.datasette.llm/extra-openai-models.yaml", text=text),),
        (f"Try it: llm -m local/{t.model} 'Hello'", *(("Store the key: llm keys set openai",) if t.api_key else ())),
        ("chat", "tools"),
    )


def cursor(t: Target, home: Path) -> Recipe:
    """Cursor can't reach this machine."""
    return Recipe(
        "Cursor",
        steps=(
            "Cursor sends its requests from its own cloud, so an address on this machine can't be reached from there.",
            "Use another editor for local models. A public tunnel would open this machine's model to the internet.",
        ),
        probes=(),
    )


RECIPES: Mapping[str, Callable[[Target, Path], Recipe]] = {
    "zed": zed, "vscode": vscode, "continue": continue_, "cline": cline, "opencode": opencode, "codex": codex,
    "claude": claude, "aider": aider, "jetbrains": jetbrains, "open-webui": open_webui, "llm": llm, "cursor": cursor,
}  # fmt: skip

_HI = [{"role": "user", "content": "Say hi."}]
_TOOL = {
    "name": "note",
    "description": "Write a note.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 16}},
        "required": ["text"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a check, and what its answer must contain."""

    what: str
    method: str
    path: str
    body: Mapping[str, Any] | None
    contains: str


def calls(probe: Probe, model: str) -> tuple[Call, ...]:
    """The requests a program of that kind makes."""
    chat = {"model": model, "messages": _HI, "max_tokens": 4}
    tool = {"type": "function", "function": _TOOL}
    forced = {**chat, "max_tokens": 64, "tools": [tool], "tool_choice": "required", "stream": True}
    by_probe: dict[Probe, tuple[Call, ...]] = {
        "models": (Call("list of models", "GET", "/v1/models", None, model),),
        "chat": (
            Call("whole answer", "POST", "/v1/chat/completions", chat, '"finish_reason"'),
            Call("streamed answer", "POST", "/v1/chat/completions", {**chat, "stream": True, "stream_options":
                 {"include_usage": True}}, '"prompt_tokens"'),
        ),
        "tools": (Call("forced tool call", "POST", "/v1/chat/completions", forced, '"name":"note"'),),
        "responses": (
            Call("responses stream", "POST", "/v1/responses", {"model": model, "input": "Say hi.", "stream": True,
                 "max_output_tokens": 4}, '"type": "response.incomplete"'),
        ),
        "anthropic": (
            Call("message stream", "POST", "/v1/messages", {**chat, "stream": True}, "message_stop"),
            Call("token count", "POST", "/v1/messages/count_tokens", {"model": model, "messages": _HI}, "input_tokens"),
        ),
        "ollama": (
            Call("Ollama's version", "GET", "/api/version", None, "version"),
            Call("Ollama's model facts", "POST", "/api/show", {"model": model}, "capabilities"),
            Call("Ollama chat", "POST", "/api/chat", {"model": model, "messages": _HI, "options": {"num_predict": 4,
                 "num_ctx": 4096}}, '"done": true'),
        ),
        "fim": (Call("fill-in", "POST", "/v1/completions", {"model": model, "prompt": "a", "suffix": "b",
                "max_tokens": 4}, "text"),),
    }  # fmt: skip
    return by_probe[probe]
