"""Counts the prompt tokens a server computed although it had computed them before: what a prefix cache must avoid."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence

from benchmarks.sse import Answer

Messages = list[dict[str, str]]


class Seen:
    """What one server has read so far. `tokens` makes of messages the tokens that its template makes."""

    def __init__(self, tokens: Callable[[Messages], Sequence[int]]) -> None:
        self._tokens = tokens
        self._lines: list[list[int]] = []
        self.twice = 0

    def ask(self, messages: Messages, ask: Callable[[], Answer]) -> Answer:
        """Send a request by `ask` and count. The answer's own tokens count as read too, as far as its text makes the
        same tokens again; the last token of a prompt does not: it is always computed, its logits are needed."""
        prompt = list(self._tokens(messages))
        known = min(max((common(prompt, line) for line in self._lines), default=0), len(prompt) - 1)
        answer = ask()
        details = answer.usage.get("prompt_tokens_details")
        cached = int(details.get("cached_tokens", 0)) if isinstance(details, dict) else 0
        self.twice += max(0, known - cached)
        self._lines += [prompt, list(self._tokens([*messages, {"role": "assistant", "content": answer.text}]))]
        return answer


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def llama_server_tokens(port: int) -> Callable[[Messages], list[int]]:
    """Tokens of messages as a llama-server at `port` makes them, for the same model."""

    def tokens(messages: Messages) -> list[int]:
        asked = messages[-1]["role"] != "assistant"
        prompt = _post(port, "/apply-template", {"messages": messages, "add_generation_prompt": asked})["prompt"]
        return _tokenized(port, str(prompt))

    return tokens


def computed_tokens(port: int) -> Callable[[Messages], list[int]]:
    """Tokens of messages as the server at `port` (ours or llama-server) makes them; behind an answer, which comes last,
    only those that it computed: what the template puts there has not been read yet, nor has the answer's last token."""

    def tokens(messages: Messages) -> list[int]:
        answered = messages[-1]["role"] == "assistant"
        asked = messages[:-1] if answered else messages
        prompt = str(_post(port, "/apply-template", {"messages": asked})["prompt"])
        return _tokenized(port, prompt + messages[-1]["content"])[:-1] if answered else _tokenized(port, prompt)

    return tokens


def _tokenized(port: int, text: str) -> list[int]:
    found = _post(port, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    assert isinstance(found, list)
    return found


def _post(port: int, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        found: dict[str, object] = json.load(response)
    return found
