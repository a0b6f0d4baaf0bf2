"""Calls a model begins by itself: once the opening marker is there, a grammar holds the call to its tool's schema.

Nothing is constrained before: the model is stopped at the marker, the marker and what always follows it are put behind
its words, and the rest of the call is generated under the grammar. So an answer without a call costs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from localllm.conversation.tools.base import Tool, ToolFormat, parameters_of
from localllm.conversation.tools.gemma_notation import gemma_calls
from localllm.conversation.tools.lark import (
    Grammar,
    Named,
    any_value,
    json_calls,
    listed_calls,
    names_all,
    parameters,
    spelled,
    tagged_calls,
    text,
)
from localllm.conversation.tools.lark import json_value as _json
from localllm.conversation.tools.prompt import any_call, as_object


@dataclass(frozen=True, slots=True)
class Start:
    """What follows an opening: `lead` always, then what `grammar` allows, then `closing` always. `again`: another call
    may come behind it."""

    lead: str
    grammar: Grammar
    closing: str = ""
    again: bool = False


def starts_of(style: ToolFormat, template: str, tools: Sequence[Tool]) -> dict[str, Start]:
    """Openings of calls in `style` and what may follow them, the first of a reply before those of further calls; {} for
    calls that no grammar here describes (they are read as the model writes them)."""
    make = _STYLES.get(style.name)
    named = [parameters_of(t) for t in tools]
    if make is None or not named:
        return {}
    if style.name in _ONE_BY_ONE and not all(names_all(schema) for _, schema in named):
        return {}  # the grammar would keep from the model what it must say
    return make(template, named)


def either(style: ToolFormat, template: str, tools: Sequence[Tool], schema: str, marker_id: int | None) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`, or one tool call; None where the format's
    calls can't be described. `marker_id`: the opening marker's token, where it is one."""
    answer = _json(json.loads(schema))
    if style.name == "llama3":
        call = _json(any_call([parameters_of(t) for t in tools], style.arguments_key))
        return f"start: answer | call\nanswer: {answer}\ncall: {call}\n"
    starts = starts_of(style, template, tools)
    if not starts:
        return None
    marker, start = next(iter(starts.items()))
    if marker not in style.markers:
        return None  # Mistral's newer spelling: one opening per function, with a control token that has no name here
    opening = f"<[{marker_id}]>" if marker_id is not None else text(marker)
    lead = text(start.lead) if start.lead else ""
    if style.name in _NAMED_TOKENS:
        opening, lead = spelled(marker), spelled(start.lead)
    kind, source = start.grammar
    body, rules = (
        (_json(json.loads(source)), "") if kind == "json_schema" else ("body", source.replace("start:", "body:", 1))
    )
    # A closing marker may be a control token, which text can't spell: the reader does without it at the reply's end.
    call = f"call_: {opening} {lead} {body}\n{rules}"
    if style.name == "harmony":
        return _in_channels("(answer | call_)", answer) + call
    return f"start: answer | call_\nanswer: {answer}\n{call}"


def answer_alone(style: ToolFormat, schema: str) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`; None where the bare schema says it all."""
    return _in_channels("answer", _json(json.loads(schema))) if style.name == "harmony" else None


def _in_channels(choices: str, answer: str) -> str:
    """Harmony: nothing stands outside a channel, and a thought may come first."""
    thought = f"{spelled('<|channel|>analysis<|message|>')} /(?s:.*)/ {spelled('<|end|><|start|>assistant')}"
    final = spelled("<|channel|>final<|message|>")
    return f"start: thought? {choices}\nthought: {thought}\nanswer: {final} {answer}\n"


def _hermes(template: str, tools: Named) -> dict[str, Start]:
    return {
        "<tool_call>": Start(
            "\n", ("json_schema", json.dumps(any_call(tools, "arguments"))), "\n</tool_call>", again=True
        )
    }


def _phi(template: str, tools: Named) -> dict[str, Start]:
    return {"<|tool_call|>": Start("", _list(tools))}


def _mistral(template: str, tools: Named) -> dict[str, Start]:
    if "[ARGS]" not in template:
        return {"[TOOL_CALLS]": Start("", _list(tools))}
    starts: dict[str, Start] = {}
    for name, schema in tools:
        grammar = "json_schema", json.dumps(as_object(schema))
        starts[f"[TOOL_CALLS]{name}[ARGS]"] = Start("", grammar, again=True)
        # An id is for the model alone: clients get one of ours.
        starts[f"[TOOL_CALLS]{name}[CALL_ID]"] = Start("000000000[ARGS]", grammar, again=True)
    return starts


def _list(tools: Named) -> Grammar:
    call = any_call(tools, "arguments")
    schema = {"type": "array", "items": {"anyOf": call["anyOf"]}, "minItems": 1, "$defs": call["$defs"]}
    return "json_schema", json.dumps(schema)


def _llama3(template: str, tools: Named) -> dict[str, Start]:
    # An answer in JSON may begin like a call: only a known name with its parameters is one.
    return {
        f'{{"name": {json.dumps(n)}, "parameters": ': Start("", ("json_schema", json.dumps(as_object(s))), "}")
        for n, s in tools
    }


def _qwen_coder(template: str, tools: Named) -> dict[str, Start]:
    lark = tagged_calls(
        tools,
        head=lambda name: f"<function={name}>\n",
        before=lambda key: f"<parameter={key}>\n",
        after="\n</parameter>\n",
        end="</function>",
    )
    return {"<tool_call>": Start("\n", lark, "\n</tool_call>", again=True)}


def _glm(template: str, tools: Named) -> dict[str, Start]:
    lark = tagged_calls(
        tools,
        head=lambda name: f"{name}\n",
        before=lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>",
        after="</arg_value>\n",
        end="",
    )
    return {"<tool_call>": Start("", lark, "</tool_call>", again=True)}


def _minimax(template: str, tools: Named) -> dict[str, Start]:
    lark = tagged_calls(
        tools,
        head=lambda name: f'<invoke name="{name}">\n',
        before=lambda key: f'<parameter name="{key}">',
        after="</parameter>\n",
        end="</invoke>\n",
        repeat=True,
    )
    return {"<minimax:tool_call>": Start("\n", lark, "</minimax:tool_call>")}


def _harmony(template: str, tools: Named) -> dict[str, Start]:
    inside = json_calls(tools, lambda name: spelled(f"{name} <|constrain|>json<|message|>"))
    outside = json_calls(tools, lambda name: spelled(f"{name}<|channel|>commentary <|constrain|>json<|message|>"))
    # <|call|> ends the turn: no other call comes behind it.
    return {
        "<|channel|>commentary to=functions.": Start("", inside, "<|call|>"),
        "<|channel|>analysis to=functions.": Start("", inside, "<|call|>"),
        "<|start|>assistant to=functions.": Start("", outside, "<|call|>"),
    }


def _kimi(template: str, tools: Named) -> dict[str, Start]:
    lark = json_calls(tools, lambda name: f"{text(f'functions.{name}:')} /[0-9]{{1,3}}/ <|tool_call_argument_begin|>")
    first, more = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
    return {
        first: Start(more, lark, "<|tool_call_end|>", again=True),
        more: Start("", lark, "<|tool_call_end|>", again=True),
    }


def _deepseek(template: str, tools: Named) -> dict[str, Start]:
    first, more, end = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    if "```json" in template:  # V3 and R1
        lead, end = "function<｜tool▁sep｜>", f"\n```{end}"
        lark = json_calls(tools, lambda name: text(f"{name}\n```json\n"))
    else:
        lead = ""
        lark = json_calls(tools, lambda name: spelled(f"{name}<｜tool▁sep｜>"))
    return {
        first: Start(more + lead, lark, end, again=True),
        more: Start(lead, lark, end, again=True),
    }


def _lfm(template: str, tools: Named) -> dict[str, Start]:
    if not all(re.fullmatch(r"[^\s()\[\]=,\"']+", word) for word in _words(tools)):
        return {}  # such a name can't be written in a call of Python's
    lark = listed_calls(
        tools,
        head=lambda name: f"{name}(",
        between=", ",
        end=")",
        pair=lambda key, described, schema: f"{text(key + '=')} {any_value(described, schema)}",
        start='"[" call (", " call)* "]"',
    )
    return {"<|tool_call_start|>": Start("", lark, "<|tool_call_end|>")}


def _function_gemma(template: str, tools: Named) -> dict[str, Start]:
    lark = gemma_calls(tools, "<escape>")
    return {"<start_function_call>": Start("", lark, "<end_function_call>", again=True)} if lark else {}


def _gemma4(template: str, tools: Named) -> dict[str, Start]:
    lark = gemma_calls(tools, '<|"|>')
    return {"<|tool_call>": Start("", lark, "<tool_call|>", again=True)} if lark else {}


def _words(tools: Named) -> list[str]:
    """Every name a call is written with."""
    return [word for name, schema in tools for word in (name, *(key for key, _, _ in parameters(schema)))]


_STYLES: Mapping[str, Callable[[str, Named], dict[str, Start]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "phi": _phi,
    "qwen_coder": _qwen_coder,
    "glm": _glm,
    "minimax": _minimax,
    "harmony": _harmony,
    "kimi": _kimi,
    "deepseek": _deepseek,
    "lfm": _lfm,
    "function_gemma": _function_gemma,
    "gemma4": _gemma4,
}
# Formats that write parameters one by one, not as one JSON object.
_ONE_BY_ONE = frozenset({"qwen_coder", "glm", "minimax", "lfm", "function_gemma", "gemma4"})
# Formats whose every marker is a control token between < and >, which a grammar asks for by name.
_NAMED_TOKENS = frozenset({"harmony", "kimi", "deepseek", "lfm", "function_gemma", "gemma4"})
