"""Refuses conversations and prompts that are many times longer than the context before other work is
done for them."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.template import MAX_CHARS
from localllm.engine.worker.client import EngineClient
from localllm.errors import ContextLengthError
from localllm.server.generation.chat import ChatRequest

# Texts of up to this many characters for each token of the context are not checked here. The worker
# counts their tokens.
_CHARS_A_TOKEN = 32
# Most texts have 3 to 5 characters a token, so a sample of this many is longer than the context.
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
    sample = ""
    for text in texts:
        sample += text[: _SAMPLE_CHARS_A_TOKEN * n_ctx - len(sample)]
    n_tokens = await engine.count_tokens(sample)
    # Texts that are tokenised together may have a few tokens less.
    if n_tokens <= n_ctx + n_ctx // 8:
        return
    about = n_tokens * n_chars // len(sample)
    raise ContextLengthError(
        f"the text has about {about} tokens, but the limit is {n_ctx}", counts=(about, n_ctx)
    )
