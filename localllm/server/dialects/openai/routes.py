"""Routes of OpenAI's API, the list of models, and other paths that take the same bodies: Mistral's
fill-in-the-middle and llama.cpp's /apply-template."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from localllm.engine.messages import MAX_TOKENS
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import Count, RequestBody, each
from localllm.server.dialects.known import read
from localllm.server.dialects.openai import chat, completions
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import Route, mount, mount_prompt, mount_whole
from localllm.server.dialects.wire import EVENTS, PageFields, page
from localllm.server.http.errors import speaks_anthropic
from localllm.server.models.router import ServedModel
from localllm.server.proxy.upstreams import RemoteModel
from localllm.server.serving import Server

# Value of `runs_on` for a model of this server.
HERE = "this server"
# Fields that are copied from an upstream's list.
_LISTED = (
    "created", "context_length", "max_model_len", "capabilities", "architecture", "status", "meta"
)  # fmt: skip
# Codex has long instructions for OpenAI's models, but no instructions for other models. These are
# short, because a local context is small.
_INSTRUCTIONS = """\
You are a coding agent in the Codex CLI. You work in the user's own files, in the directory named in the environment context.

- Do the task to its end before you answer: look at the files it is about, make the changes, run what shows that they work.
- Run commands with the shell tool: rg or grep to search, sed -n to read a part of a file. Read a file before you change it.
- Change files with apply_patch where it is offered, else by a command. A patch begins with *** Begin Patch, then for each \
file *** Update File: path with @@ and lines that begin with a space, - or + (or *** Add File: path with + lines, or \
*** Delete File: path), and ends with *** End Patch. Lines without + must be in the file word for word.
- Change only what the task needs, in the style of the code around it. Never undo changes that you did not make.
- Instructions in AGENTS.md files hold for the directory they stand in.
- When a command fails, read its output and try another way. Don't repeat the same call.
- Answer briefly: what you changed and where, what you checked, and what is left to do.
"""


def entry(model: ServedModel) -> dict[str, Any]:
    """Return one model in OpenAI's format.

    Fields for editors: `context_length`, `meta.n_ctx`, `architecture`, `status`.
    Fields of this server: `physics` (bytes per token and this machine's rates), `notice` (how the
    model runs), `sampling` (the defaults), and `has_system` (whether the preset has a system
    prompt)."""
    n_ctx = model.served_n_ctx
    body: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "localllm",
        "runs_on": HERE,
        "aliases": list(model.aliases),
        "context_length": n_ctx,
        "max_model_len": n_ctx,
        "capabilities": model.capabilities,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": status(model),
        "meta": _meta(model),
    }
    if not (model.facts.embeds or model.facts.ranks):
        names = ("temperature", "top_p", "top_k", "min_p")
        body["sampling"] = {name: getattr(model.sampling, name) for name in names}
        body["has_system"] = bool(model.defaults.system)
    if model.facts.physics:
        body["physics"] = dict(model.facts.physics)
    if model.worker.notice:
        body["notice"] = model.worker.notice
    return body


def _meta(model: ServedModel) -> dict[str, Any]:
    """Return llama.cpp's `meta`. For a model that is not loaded, it contains only the context
    length."""
    info = model.info
    if info is None:
        return {"n_ctx": model.served_n_ctx}
    return {
        "n_ctx": model.served_n_ctx,
        "n_ctx_train": info.n_ctx_train,
        "n_vocab": info.n_vocab,
        "n_params": info.n_params,
        "size": info.weights_bytes,
        "architecture": info.architecture,
    }


def remote_entry(model: RemoteModel) -> dict[str, Any]:
    """Return an upstream's model: the upstream's facts, this server's name for the model, and the
    upstream's name. The upstream's address is not shown."""
    listed = {name: model.facts[name] for name in _LISTED if name in model.facts}
    context = listed.get("context_length") or listed.get("max_model_len")
    if context:
        listed["context_length"] = context
        listed["max_model_len"] = context
    return {
        "created": 0,
        **listed,
        "id": model.name,
        "object": "model",
        "owned_by": model.upstream.name,
        "runs_on": model.upstream.name,
    }


def status(model: ServedModel) -> dict[str, Any]:
    """Return llama.cpp's status: loaded, loading (with `progress`) or unloaded."""
    if model.state == "loading":
        return {"value": "loading", "progress": round(model.worker.progress, 3)}
    if model.loaded:
        return {"value": "loaded"}
    if model.worker.failure:
        return {"value": "unloaded", "failed": True}
    return {"value": "unloaded"}


def codex_entry(model: ServedModel) -> dict[str, Any]:
    """Return one model in the format of Codex's catalogue."""
    name = model.name
    n_ctx = model.served_n_ctx
    reasons = "thinking" in model.capabilities
    efforts = ("none", "low", "medium", "high") if reasons else ()
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "default_reasoning_level": "medium" if reasons else None,
        "supported_reasoning_levels": [{"effort": e, "description": e} for e in efforts],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": reasons,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": n_ctx,
        "max_context_window": n_ctx,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }


def model_entry(model: ServedModel) -> dict[str, Any]:
    """Return one model in the format of Anthropic's Models API."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC).isoformat(),
        "lifecycle": "active",
        **dict.fromkeys(("max_input_tokens", "max_tokens"), model.served_n_ctx),
        **dict.fromkeys(("capabilities", "deprecated_at", "line", "retires_at")),
    }


class EmbeddingFields(RequestBody):
    """POST /v1/embeddings."""

    input: (
        str
        | vectors.Texts
        | Annotated[list[Count], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[Count], Field(min_length=1)]],
            Field(min_length=1, max_length=vectors.MOST_INPUTS),
        ]
    ) = Field(description="a text, texts, token ids, or lists of token ids")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="the first so many numbers, made length 1"
    )


_KEYS = ("id", "choices", "usage")
CHAT = Route(
    "/v1/chat/completions",
    chat.ChatFields,
    chat.translate,
    EVENTS,
    "Answer a conversation, whole or as server-sent events",
    _KEYS,
    aliases=("/chat/completions",),
)
COMPLETIONS = Route(
    "/v1/completions",
    completions.CompletionFields,
    completions.translate,
    EVENTS,
    "Continue raw text, or fill in between a prompt and a suffix",
    _KEYS,
    aliases=("/completions",),
)
FILL_IN = Route(
    "/v1/fim/completions",
    completions.CompletionFields,
    completions.translate_fill_in,
    EVENTS,
    "Fill in between a prompt and a suffix, answered in the shape of a chat",
    _KEYS,
    aliases=("/fim/completions",),
)


def routes(server: Server) -> Paths:
    paths = Paths("OpenAI")

    @paths.answers("GET", "/v1/models", "/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The models that this server offers. Clients of Anthropic's API get Anthropic's format.
        For Codex, the list is also in `models`; `data` is OpenAI's field."""
        ours = server.models.names()
        if speaks_anthropic(request.scope):
            wanted, _ = read(PageFields, request.query_params)
            return page([model_entry(model) for model in ours], wanted)
        entries = [entry(model) for model in ours]
        entries += (remote_entry(model) for model in server.models.elsewhere())
        generating = [model for model in server.models.list() if not model.facts.embeds]
        codex_entries = [codex_entry(model) for model in generating]
        return {"object": "list", "data": entries, "models": codex_entries}

    @paths.answers("GET", "/v1/models/{model_id:path}")
    async def get_model(request: Request) -> dict[str, Any]:
        """One model."""
        model_id = request.path_params["model_id"]
        if speaks_anthropic(request.scope):
            return model_entry(server.models.listed(model_id))
        remote = server.models.named_elsewhere(model_id)
        if remote is not None:
            return remote_entry(remote)
        return entry(server.models.listed(model_id))

    mount(paths, server, CHAT, COMPLETIONS, FILL_IN)

    def templated(prompt: str, tokens: int) -> dict[str, Any]:
        return {"prompt": prompt}

    # llama.cpp's path. It takes the body of a chat.
    about = "The prompt that a conversation becomes"
    mount_prompt(paths, server, "/apply-template", CHAT, about, templated)

    async def embed(fields: EmbeddingFields) -> Any:
        name, rows, tokens = await vectors.embed(server, fields.model, each(fields.input))
        data = []
        for i, row in enumerate(rows):
            shaped = vectors.cut(row, fields.dimensions)
            vector: str | list[float] = vectors.numbers(shaped)
            if fields.encoding_format == "base64":
                vector = base64.b64encode(shaped).decode()
            data.append({"object": "embedding", "index": i, "embedding": vector})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": name, "data": data, "usage": usage}

    about = "Turn texts into vectors"
    mount_whole(
        paths, server, "/v1/embeddings", EmbeddingFields, embed, about, (), ("/embeddings",)
    )
    return paths
