"""Keeps the beginning of a prompt the same across requests, so that its KV is reused.

Reasoning that a client leaves out is restored. Lines that an agent changes every time are removed.
Some templates write earlier reasoning into the prompt. If it is missing, the prompt differs and the
complete prefix is computed again (measured by others: minutes instead of seconds,
https://github.com/nibor1896/Crow/issues/60).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from localllm import json_store

_MAX_ENTRIES = 4096
_MAX_CHARS = 64 * 2**20
# Claude Code puts its billing header, with a new checksum each time, at the beginning of the system
# prompt: https://github.com/ollama/ollama/pull/14918, https://github.com/bman654/clodex/pull/93
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE | re.IGNORECASE)


class ReasoningCache:
    """Reasoning by the answer that followed it. In memory only; the oldest is evicted first."""

    def __init__(self) -> None:
        self._reasoning_by_answer: OrderedDict[str, str] = OrderedDict()
        self._chars = 0

    def remember(
        self, question: str, text: str, calls: Sequence[tuple[str, str]], reasoning: str
    ) -> None:
        """Keep the `reasoning` of an answer to `question` (the turn before it).

        `calls` are the answer's calls as (name, JSON arguments).
        """
        if not reasoning or len(reasoning) > _MAX_CHARS:
            return
        key = _answer_key(question, text, calls)
        self._chars += len(reasoning) - len(self._reasoning_by_answer.pop(key, ""))
        self._reasoning_by_answer[key] = reasoning
        while len(self._reasoning_by_answer) > _MAX_ENTRIES or self._chars > _MAX_CHARS:
            self._chars -= len(self._reasoning_by_answer.popitem(last=False)[1])

    def restore(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with known reasoning restored in assistant turns that lack it."""
        restored: list[dict[str, Any]] = []
        question = ""
        for message in messages:
            copy = dict(message)
            if copy["role"] == "assistant" and not copy.get("reasoning_content"):
                functions = [call["function"] for call in copy.get("tool_calls", ())]
                calls = [(function["name"], function["arguments"]) for function in functions]
                reasoning = self._reasoning_by_answer.get(
                    _answer_key(question, copy["content"], calls)
                )
                if reasoning is not None:
                    copy["reasoning_content"] = reasoning
            question = copy["content"]
            restored.append(copy)
        return restored


def _canonical(arguments: Any) -> str:
    if isinstance(arguments, str):
        parsed = json_store.parsed(arguments)
        if parsed is not None:
            arguments = parsed
    return json.dumps(arguments, sort_keys=True)


def _answer_key(question: str, text: str, calls: Sequence[tuple[str, Any]]) -> str:
    """The key of an answer to `question`; `calls` as (name, arguments as an object or JSON)."""
    plain_calls = [(name, _canonical(arguments)) for name, arguments in calls]
    key = json.dumps([question.strip(), text.strip(), plain_calls])
    return hashlib.sha256(key.encode()).hexdigest()


def without_billing(text: str) -> str:
    """`text` of a system prompt without the billing header."""
    return _BILLING.sub("", text)


def without_changing_lines(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The messages without the lines that agents change with every request, and the lines'
    names."""
    removed_names: tuple[str, ...] = ()
    cleaned: list[dict[str, Any]] = []
    for message in messages:
        copy = dict(message)
        if copy["role"] == "system":
            copy["content"], count = _BILLING.subn("", copy["content"])
            if count:
                removed_names = ("billing-header",)
        cleaned.append(copy)
    return cleaned, removed_names
