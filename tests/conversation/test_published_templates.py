"""Every template in llama.cpp's sources renders fifteen ordinary conversations of agents.

The templates are not in this repository: name a llama.cpp source tree in
LOCALLLM_LLAMA_CPP_SOURCE (the one inside llama-cpp-python's source distribution is
vendor/llama.cpp). Their shapes are also tested in test_message_variants.py, which needs no
source tree.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conversation.agent_conversations import (
    BOS,
    EOS,
    Conversation,
    conversations,
    plain_jinja,
)
from localllm.conversation.messages import normalise
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools.prompt import with_instruction

_SOURCE = os.environ.get("LOCALLLM_LLAMA_CPP_SOURCE")
_FOLDER = Path(_SOURCE or "") / "models" / "templates"
_FILES = sorted(_FOLDER.glob("*.jinja")) if _SOURCE else []

pytestmark = pytest.mark.skipif(
    not _SOURCE,
    reason="set LOCALLLM_LLAMA_CPP_SOURCE to a llama.cpp source tree to try its "
    "published "
    "templates",
)


def test_the_source_tree_has_templates() -> None:
    assert len(_FILES) >= 50, f"{_FOLDER} holds {len(_FILES)} templates"


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_every_template_renders_every_conversation(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_text=BOS, eos_text=EOS)
    for conversation in conversations():
        ours = _ours(template, conversation)
        plain = _plain(source, conversation) if template.knows_tools else None
        if plain is not None:
            assert ours == plain, conversation.name
        else:
            questions = [
                m["content"] for m in conversation.messages if m["role"] == "user" and m["content"]
            ]
            for question in questions:
                assert all(text in ours for text in _texts(question)), (conversation.name, question)


def _texts(content: object) -> list[str]:
    return [p["text"] for p in content] if isinstance(content, list) else [str(content)]


def _ours(template: ChatTemplate, conversation: Conversation) -> str:
    messages = normalise(conversation.messages)
    if not template.knows_tools:
        messages = with_instruction(messages, conversation.tools or [])
    return template.render(messages, tools=conversation.tools)


def _plain(source: str, conversation: Conversation) -> str | None:
    """Return Jinja's rendering, with reasoning under the name that the template reads.

    Returns None if Jinja fails.
    """
    messages = normalise(conversation.messages)
    if "reasoning_content" not in source and "thinking" in source:
        messages = [
            {**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m
            for m in messages
        ]
    try:
        return plain_jinja(source, messages, conversation.tools)
    except Exception:
        return None
