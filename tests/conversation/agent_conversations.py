"""Fifteen ordinary conversations in the form that agents' clients send, and plain Jinja.

Tests compare our rendering with that of plain Jinja.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BOS, EOS = "<s>", "</s>"
LARGEST = 9007199254740991  # 2**53 - 1: "any integer" in zod and TypeScript clients
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "which city"},
                "days": {"type": "integer", "minimum": 0, "maximum": LARGEST},
                "units": {"type": "string", "enum": ["metric", "imperial"]},
            },
            "required": ["city"],
        },
    },
}
RUN = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Runs a command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}},
                "timeout": {"type": "number", "description": "milliseconds"},
                "env": {"type": "object", "properties": {"NAME": {"type": "string"}}},
            },
            "required": ["command"],
        },
    },
}
TOOLS = [WEATHER, RUN]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A client's messages, and its tools if any.

    `words` are texts that the prompt must contain.
    """

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    words: tuple[str, ...] = ()


def _said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(identity: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


_PARIS = _call("call_7f3kQ0aZrWcP5mYtB2nE", "get_weather", {"city": "Paris"})
_OSLO = _call("call_9d1hJ4xUsVbN8kLgT6oR", "get_weather", {"city": "Oslo", "days": 2})
_BUILD = _call(
    "toolu_01A09q90qw90lq917835lq9",
    "run_command",
    {"command": ["make", "all"], "timeout": 120000, "env": {"NAME": "x"}},
)
_HUGE = _call("call_Zk2", "get_weather", {"city": "Rome", "days": LARGEST})
_ASK = _said("user", "How is Paris?")


def _result(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    return _said("tool", text, tool_call_id=call["id"], name=call["function"]["name"])


def _calls(*calls: Mapping[str, Any], content: str | None = None, **more: Any) -> dict[str, Any]:
    return _said("assistant", content, tool_calls=list(calls), **more)


_TURNS = [
    _said("user", "Hello there"),
    _said("assistant", "Good morning"),
    _said("user", "And now?"),
]
_CONVERSATIONS = (
    Conversation("one", [_said("user", "Hello there")], words=("Hello there",)),
    Conversation(
        "system", [_said("system", "Be brief."), *_TURNS[:1]], words=("Be brief.", "Hello there")
    ),
    Conversation(
        "turns",
        [_said("system", "Be brief."), *_TURNS],
        words=("Be brief.", "Hello there", "Good morning", "And now?"),
    ),
    Conversation(
        "developer",
        [_said("developer", "Be brief."), *_TURNS[:1]],
        words=("Be brief.", "Hello there"),
    ),
    Conversation(
        "two systems",
        [_said("system", "Be brief."), _said("system", "Be kind."), *_TURNS[:1]],
        words=("Be brief.", "Be kind.", "Hello there"),
    ),
    Conversation(
        "late system",
        [_said("system", "Be brief."), *_TURNS[:2], _said("system", "Be kind."), *_TURNS[2:]],
        words=("Be brief.", "Be kind.", "Good morning", "And now?"),
    ),
    Conversation(
        "parts",
        [
            _said(
                "user",
                [{"type": "text", "text": "Hello there"}, {"type": "text", "text": "And now?"}],
            )
        ],
        words=("Hello there", "And now?"),
    ),
    Conversation(
        "tools",
        [_said("system", "Be brief."), _ASK],
        TOOLS,
        ("Be brief.", "How is Paris?", "get_weather"),
    ),
    Conversation(
        "loop",
        [_said("system", "Be brief."), _ASK, _calls(_PARIS), _result(_PARIS, "18 degrees")],
        TOOLS,
        ("How is Paris?", "get_weather", "18 degrees"),
    ),
    Conversation(
        "loop with large numbers",
        [
            _said("user", "Build it"),
            _calls(_BUILD, content="I build."),
            _result(_BUILD, '{"bytes": 123456789012}'),
            _calls(_HUGE),
            _result(_HUGE, "no such day"),
            _said("assistant", "Built."),
            _said("user", "Again"),
        ],
        TOOLS,
        ("Build it", "120000", "123456789012", str(LARGEST), "no such day", "Built.", "Again"),
    ),
    Conversation(
        "parallel calls",
        [
            _ASK,
            _calls(_PARIS, _OSLO),
            _result(_PARIS, "18 degrees"),
            _result(_OSLO, "4 degrees"),
        ],
        TOOLS,
        ("Oslo", "18 degrees", "4 degrees"),
    ),
    Conversation(
        "thinking in a loop",
        [
            _ASK,
            _calls(_PARIS, reasoning_content="I must look."),
            _result(_PARIS, "18 degrees"),
            _calls(_OSLO, content="Now Oslo.", reasoning_content="Oslo is next."),
            _result(_OSLO, "4 degrees"),
        ],
        TOOLS,
        ("18 degrees", "Oslo", "4 degrees"),
    ),
    Conversation(
        "thinking before a user turn",
        [
            _said("user", "Hello there"),
            _said("assistant", "Good morning", reasoning_content="A greeting."),
            *_TURNS[2:],
        ],
        words=("Good morning", "And now?"),
    ),
    Conversation(
        "error result",
        [
            _ASK,
            _calls(_PARIS),
            _result(_PARIS, "Error: timed out after 120000 ms"),
            _calls(_PARIS),
            _result(_PARIS, ""),
            _said("assistant", "It fails."),
            _said("user", "And now?"),
        ],
        TOOLS,
        ("timed out after 120000 ms", "It fails.", "And now?"),
    ),
    Conversation(
        "calls without tools",
        [
            _ASK,
            _calls(_PARIS),
            _result(_PARIS, "18 degrees"),
            _said("assistant", "It is mild."),
            _said("user", "Thanks"),
        ],
        None,
        ("18 degrees", "It is mild.", "Thanks"),
    ),
)


def conversations() -> list[Conversation]:
    """Return new copies of all conversations, which a test may change."""
    return copy.deepcopy(list(_CONVERSATIONS))


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja reads it off the class

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain_jinja(source: str, messages: Any, tools: Any, **variables: Any) -> str:
    """Render with Jinja and the settings of Hugging Face's `apply_chat_template`.

    Raises Jinja's errors.
    """
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise ValueError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **k: Any
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **k
        )

    env.filters["tojson"] = tojson
    env.globals.update(
        raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form)
    )
    return env.from_string(source).render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=True,
        bos_token=BOS,
        eos_token=EOS,
        **variables,
    )
