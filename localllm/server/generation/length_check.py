"""Refuses conversations and prompts that are many times longer than the context before other work
is done for them."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.template import MAX_CHARS
from localllm.engine.worker.client import EngineClient
from localllm.errors import ContextLengthError
from localllm.server.generation.chat import ChatRequest

# Texts of up to this many characters for each token of the context are not checked here. The worker
# counts their tokens.
_CHARS_A_TOKEN = 32
# A text's first characters show how many it has for each token: most have 3 to 5.
_PROBE_CHARS = 4096
# A sample of the text that is longer than the context has at most so many.
_SAMPLE_CHARS_A_TOKEN = 12


async def check_fits(chat: ChatRequest, engine: EngineClient) -> None:
    """Raise ContextLengthError if the user's texts are far too long for the context."""
    if chat.compaction or chat.edits is not None or chat.summary is not None:
        return
    # No template omits or shortens these texts.
    texts = [m["content"] for m in chat.messages if m["role"] == "user"]
    texts = [text for text in texts if isinstance(text, str)]
    # Still longer texts have an error of their own (`check_length`).
    if sum(map(len, texts)) <= MAX_CHARS:
        await check_texts_fit(texts, engine)


async def check_texts_fit(texts: Sequence[str], engine: EngineClient) -> None:
    """Raise ContextLengthError if `texts` together are far too long for the context.

    Only their beginning is sent to the worker. Rendering a text of 6 MB, and sending it, delayed
    the requests of other clients by up to a second."""
    n_ctx = engine.info.n_ctx
    n_chars = sum(map(len, texts))
    if n_chars <= _CHARS_A_TOKEN * n_ctx:
        return
    # Texts that are tokenised together may have a few tokens less.
    most_tokens = n_ctx + n_ctx // 8
    probe = _beginning(texts, _PROBE_CHARS)
    chars_a_token = len(probe) / max(1, await engine.count_tokens(probe))
    chars_a_token = min(1.25 * chars_a_token, _SAMPLE_CHARS_A_TOKEN)
    sample = _beginning(texts, int(chars_a_token * most_tokens))
    n_tokens = await engine.count_tokens(sample)
    if n_tokens <= most_tokens:
        return
    about = n_tokens * n_chars // len(sample)
    raise ContextLengthError(
        f"the text has about {about} tokens, but the limit is {n_ctx}", counts=(about, n_ctx)
    )


def _beginning(texts: Sequence[str], n_chars: int) -> str:
    """Return the first characters of `texts` together."""
    found = ""
    for text in texts:
        found += text[: n_chars - len(found)]
    return found
