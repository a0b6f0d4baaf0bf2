"""Routes of OpenAI's API, the list of models, and other paths that take the same bodies: Mistral's
fill-in-the-middle and llama.cpp's /apply-template."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request

from localllm.engine.messages import MAX_TOKENS
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import read
from localllm.server.dialects.openai import chat, completions, transcriptions
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import (
    COUNT,
    Form,
    Route,
    mount,
    mount_form,
    mount_non_streaming,
    mount_prompt,
)
from localllm.server.dialects.wire import EVENTS, PageFields, page
from localllm.server.generation.job import GenerationJob
from localllm.server.http.errors import speaks_anthropic
from localllm.server.models.router import ServedModel
from localllm.server.proxy.upstreams import RemoteModel
from localllm.server.serving import Server
from localllm_backends.control_text import without_marks

# Value of `runs_on` for a model of this server.
LOCAL = "this server"
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
        "runs_on": LOCAL,
        "aliases": list(model.aliases),
        "context_length": n_ctx,
        "max_model_len": n_ctx,
        "capabilities": model.capabilities,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": status(model),
        # llama.cpp's word for a model that is loaded by its name. pi offers no other ones.
        "source": "preset",
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


def llamacpp_entry(model: ServedModel) -> dict[str, Any]:
    """Return the fields of llama.cpp's `models` list, which are those of Ollama's list."""
    capabilities = ["completion"]
    if "vision" in model.capabilities:
        capabilities.append("multimodal")
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "tags": [],
        "capabilities": capabilities,
        "parameters": "",
        "details": {"parent_model": "", "format": "gguf", "family": "", "families": []},
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

    input: vectors.Inputs = Field(
        description="a text, or token ids with texts among them, or several of those"
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="number of dimensions: the vectors are truncated and normalised again",
    )


_KEYS = ("id", "choices", "usage")
CHAT = Route(
    "/v1/chat/completions",
    chat.ChatFields,
    chat.translate,
    EVENTS,
    "Answer a conversation, as one object or as server-sent events",
    _KEYS,
    aliases=("/chat/completions",),
)
COMPLETIONS = Route(
    "/v1/completions",
    completions.CompletionFields,
    completions.translate,
    EVENTS,
    "Complete raw text, or fill in between a prompt and a suffix",
    _KEYS,
)
FILL_IN = Route(
    "/v1/fim/completions",
    completions.CompletionFields,
    completions.translate_fill_in,
    EVENTS,
    "Fill in between a prompt and a suffix; the reply has the format of a chat",
    _KEYS,
    aliases=("/fim/completions",),
)


def routes(server: Server) -> Paths:
    paths = Paths("OpenAI")

    @paths.answers("GET", "/v1/models", "/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The models that this server offers. Clients of Anthropic's API get Anthropic's format.
        For Codex and llama.cpp's clients, the list is also in `models`; `data` is OpenAI's
        field."""
        ours = server.models.names()
        if speaks_anthropic(request.scope):
            wanted, _ = read(PageFields, request.query_params)
            return page([model_entry(model) for model in ours], wanted)
        entries = [entry(model) for model in ours]
        entries += (remote_entry(model) for model in server.models.remote_models())
        generating = [model for model in server.models.list() if not model.facts.embeds]
        described = [{**codex_entry(model), **llamacpp_entry(model)} for model in generating]
        return {"object": "list", "data": entries, "models": described}

    @paths.answers("GET", "/v1/models/{model_id:path}")
    async def get_model(request: Request) -> dict[str, Any]:
        """One model."""
        model_id = request.path_params["model_id"]
        if speaks_anthropic(request.scope):
            return model_entry(server.models.listed(model_id))
        remote = server.models.remote_model_named(model_id)
        if remote is not None:
            return remote_entry(remote)
        return entry(server.models.listed(model_id))

    mount(paths, server, CHAT, COMPLETIONS, FILL_IN)

    def templated(job: GenerationJob, tokens: int) -> dict[str, Any]:
        return {"prompt": without_marks(str(job.prompt))}

    # llama.cpp's path. It takes the body of a chat.
    about = "Return the rendered prompt of a conversation"
    mount_prompt(paths, server, "/apply-template", CHAT, about, templated)

    def counted_tokens(job: GenerationJob, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    alias = ("/chat/completions/input_tokens",)
    mount_prompt(
        paths, server, "/v1/chat/completions/input_tokens", CHAT, COUNT, counted_tokens, alias
    )

    _embeddings(paths, server)
    for name, task, about in (
        ("transcriptions", "transcribe", "Write down the speech of a recording"),
        ("translations", "translate", "Translate the speech of a recording into English"),
    ):
        translated = partial(transcriptions.translate, task=task)
        form = Form(f"/v1/audio/{name}", transcriptions.TranscriptionFields, translated, about)
        mount_form(paths, server, form)
    return paths


def _embeddings(paths: Paths, server: Server) -> None:
    async def embed(fields: EmbeddingFields) -> Any:
        inputs = vectors.each_input(fields.input)
        name, rows, tokens = await vectors.embed(server, fields.model, inputs)
        data = []
        for i, row in enumerate(rows):
            shaped = vectors.cut(row, fields.dimensions)
            vector: str | list[float] = vectors.numbers(shaped)
            if fields.encoding_format == "base64":
                vector = base64.b64encode(shaped).decode()
            data.append({"object": "embedding", "index": i, "embedding": vector})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": name, "data": data, "usage": usage}

    about = "Compute the embeddings of texts"
    mount_non_streaming(
        paths, server, "/v1/embeddings", EmbeddingFields, embed, about, (), ("/embeddings",)
    )
