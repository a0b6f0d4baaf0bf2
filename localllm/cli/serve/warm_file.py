"""The file of `serve --warm FILE`: a system prompt, or a chat request."""

from __future__ import annotations

from pathlib import Path

from localllm import json_store, paths
from localllm.errors import UsageError
from localllm.server.dialects.known import read
from localllm.server.dialects.openai.chat import ChatFields, translate
from localllm.server.generation.chat import ChatRequest
from localllm.server.models.router import ServedModel
from localllm.server.warming import RequestFor

# The value of `--warm` for the instructions that clients sent last.
LAST_REQUESTS = "last"
_MAX_BYTES = 2**22


def warming_request(file_or_last: str) -> RequestFor | None:
    """Return the function that makes the file's request for a model, or None for `last`. JSON is a chat
    request with messages and tools, and any other text is the system prompt. Raises UsageError."""
    if file_or_last == LAST_REQUESTS:
        return None
    file = Path(file_or_last).expanduser()
    try:
        text = paths.file_text(file, _MAX_BYTES)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"--warm {file} can't be read: {reason}",
            hint="name a text file with a system prompt, a JSON file with a chat request, or last",
        ) from e
    body = json_store.parsed(text)
    if not isinstance(body, dict):
        body = {"messages": [{"role": "system", "content": text}]}
    fields, _ = read(ChatFields, body)

    def request(model: ServedModel) -> ChatRequest:
        task = translate(fields, model).task
        assert isinstance(task, ChatRequest)
        return task

    return request
