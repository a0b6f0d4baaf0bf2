"""Random requests of every kind from a seed, and a client that records how each of them ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Body = dict[str, Any]
End = Literal["finished", "refused", "failed", "left", "lost", "hung", "wrong"]

# A request that takes longer than this hangs. The longest of the mix takes seconds, and tens of
# seconds in a full queue.
LIMIT_S = 180.0
_KINDS = {
    "chat": 32,
    "branch": 20,
    "long": 4,
    "schema": 10,
    "tools": 12,
    "choices": 8,
    "stops": 10,
    "completion": 4,
}
_LEAVES = 0.25
_REQUIRED = ["name", "size", "tags"]
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": _REQUIRED,
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# Long enough to be worth caching, and few enough that most requests find theirs cached: about 300
# tokens each.
_HEADS = [f"You are assistant number {i}. " + f"Rule {i}: answer shortly, plainly, about the question. " * 25
          for i in range(6)]  # fmt: skip
_TOPICS = [
    "a river",
    "the moon",
    "old maps",
    "bread",
    "a small dog",
    "winter",
    "numbers",
    "a ship",
    "glass",
    "songs",
]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its path and body, and the time at which its client leaves.

    `leave_s`: seconds after the request was sent, for any answer so far. `leave_events`: the number
    of events of a stream.
    """

    kind: str
    path: str
    body: Body
    leave_s: float | None = None
    leave_events: int | None = None

    @property
    def streams(self) -> bool:
        """True if the answer comes in events."""
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Ended:
    """The end of a request: kind, time (time.monotonic), and the error text if it did not
    finish."""

    ask: Ask
    end: End
    at_s: float
    took_s: float
    why: str = ""


@dataclass(slots=True)
class Events:
    """The events of a request so far, for tasks that act during its stream, and finally its
    usage."""

    seen: int = 0
    words: int = 0
    text: str = ""
    usage: Body = field(default_factory=dict)
    said: asyncio.Event = field(default_factory=asyncio.Event)


def draw(rng: random.Random, *, longest_words: int = 340) -> Ask:
    """Return the next request of the mix. `longest_words` limits the long prompts. One of their
    words has about six tokens."""
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    # Mostly short answers of 1 to 64 tokens, log-uniform, because a soak needs many requests, not
    # many tokens.
    body: Body = {"max_tokens": round(64 ** rng.random()), "stream": rng.random() < 0.7}
    body |= {"temperature": rng.choice([0, 0, 0.8, 1.2]), "seed": rng.randrange(1000)}
    text = f"Tell me about {rng.choice(_TOPICS)} and {rng.choice(_TOPICS)}."
    path, messages = "/v1/chat/completions", [{"role": "user", "content": text}]
    if kind == "branch":
        messages.insert(0, {"role": "system", "content": rng.choice(_HEADS)})
        if rng.random() < 0.5:
            messages += [
                {"role": "assistant", "content": rng.choice(_TOPICS)},
                {"role": "user", "content": "More?"},
            ]
    elif kind == "long":
        messages[0]["content"] = f"{unique(rng, longest_words)} {text}"
    elif kind == "schema":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": _SCHEMA},
        }
    elif kind == "tools":
        body |= {"tools": [_TOOL], "tool_choice": rng.choice(["auto", "required"])}
    elif kind == "choices":
        body |= {"n": 2, "temperature": 1.0}
    elif kind == "stops":
        body["stop"] = rng.sample([" the", ".", ",", "\n", " a", "moon"], 2)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if kind == "completion":
        path = "/v1/completions"
        body["prompt"] = text
    else:
        body["messages"] = messages
    leave_s = leave_events = None
    if rng.random() < _LEAVES:
        # Before the headers, during prefill, or during the answer.
        if body["stream"] and rng.random() < 0.5:
            leave_events = rng.randint(1, 20)
            body["max_tokens"] = 64
        else:
            leave_s = rng.choice([0.02, 0.2, 1.5]) * rng.random()
    return Ask(kind, path, body, leave_s, leave_events)


def unique(rng: random.Random, longest_words: int) -> str:
    """Return `longest_words` ÷ 4 to `longest_words` words, log-uniform, that no cache contains."""
    return " ".join(
        f"w{rng.randrange(1000, 9999)}" for _ in range(int(longest_words * 4 ** -rng.random()))
    )


def flowing(text: str, n: int) -> Ask:
    """Return a stream of `n` tokens that only its length limit ends."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n,
        "stream": True,
        "ignore_eos": True,
    }
    told = {"stream_options": {"include_usage": True}}
    return Ask("flowing", "/v1/chat/completions", {**body, **told, "temperature": 0})


async def send(
    http: httpx.AsyncClient, ask: Ask, events: Events | None = None, limit_s: float = LIMIT_S
) -> Ended:
    """Send `ask` and return its end. The client leaves as `ask` defines, at the latest after
    `limit_s`."""
    began = time.monotonic()
    events = events or Events()
    deadline = limit_s if ask.leave_s is None else min(limit_s, ask.leave_s)
    end: End
    try:
        async with asyncio.timeout(deadline):
            end, why = await (
                _stream(http, ask, events) if ask.streams else _whole(http, ask, events)
            )
    except TimeoutError:
        end, why = (
            ("left", "")
            if ask.leave_s is not None
            else ("hung", f"nothing ended it in {limit_s:.0f} s")
        )
    except httpx.HTTPError as e:
        end, why = "lost", f"{type(e).__name__}: {e}"
    at = time.monotonic()
    return Ended(ask, end, at, at - began, why)


async def _whole(http: httpx.AsyncClient, ask: Ask, events: Events) -> tuple[End, str]:
    reply = await http.post(ask.path, json=ask.body)
    if reply.status_code != 200:
        return _refusal(reply.status_code, reply.content)
    said = reply.json()
    choices, events.usage = said["choices"], said.get("usage") or {}
    events.text = "".join(
        c.get("text") or c.get("message", {}).get("content") or "" for c in choices
    )
    if len(choices) != ask.body.get("n", 1) or not all(c.get("finish_reason") for c in choices):
        return "lost", "a choice without a finish_reason"
    if ask.kind == "schema" and choices[0]["finish_reason"] == "stop":
        return _kept(choices[0]["message"]["content"])
    return "finished", ""


async def _stream(http: httpx.AsyncClient, ask: Ask, events: Events) -> tuple[End, str]:
    finished: set[int] = set()
    done, stopped = False, False
    async with http.stream("POST", ask.path, json=ask.body) as reply:
        if reply.status_code != 200:
            return _refusal(reply.status_code, await reply.aread())
        async for data in _events(reply):
            if data == "[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return "failed", str(chunk["error"].get("code"))
            events.usage = chunk.get("usage") or events.usage
            for choice in chunk["choices"]:
                content = choice.get("text") or choice.get("delta", {}).get("content") or ""
                events.text += content
                events.words += bool(content)
                if choice.get("finish_reason"):
                    finished.add(choice["index"])
                    stopped = choice["finish_reason"] == "stop"
            events.seen += 1
            events.said.set()
            if ask.leave_events is not None and events.seen >= ask.leave_events:
                return "left", ""
    if len(finished) != ask.body.get("n", 1) or not done:
        return "lost", f"the stream ended with {len(finished)} finished choices, [DONE]: {done}"
    return _kept(events.text) if ask.kind == "schema" and stopped else ("finished", "")


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line[6:]


def _refusal(status: int, content: bytes) -> tuple[End, str]:
    try:
        code = json.loads(content)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return "lost", f"status {status} without an error: {content[:100]!r}"
    return ("refused" if code == "server_busy" else "failed"), str(code)


def _kept(text: str) -> tuple[End, str]:
    """Return whether an answer that ended without its limit matches the schema."""
    try:
        value = json.loads(text)
        good = set(value) == set(_REQUIRED) and value["size"] in ("small", "large")
    except (ValueError, TypeError):
        good = False
    return ("finished", "") if good else ("wrong", f"not of its schema: {text[:100]!r}")
