"""Tool calls in the format of each family of models, by the name of the format. The format's reader
must return these calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

M3 = "]<]minimax[>["
Calls = list[tuple[str, dict[str, Any]]]


def _json(args: dict[str, Any]) -> str:
    return json.dumps(args, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _call(name: str, args: dict[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {_json(args)}}}'


def _qwen_coder(name: str, args: dict[str, Any]) -> str:
    values = "".join(f"<parameter={k}>\n{_raw(v)}\n</parameter>\n" for k, v in args.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(name: str, args: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{_raw(v)}</arg_value>\n" for k, v in args.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _seed(name: str, args: dict[str, Any]) -> str:
    values = "".join(f"<parameter={k}>{_raw(v)}</parameter>\n" for k, v in args.items())
    return f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>"


def _dsml(calls: Calls) -> str:
    def one(name: str, args: dict[str, Any]) -> str:
        values = "".join(
            f'<｜DSML｜parameter name="{k}" '
            f'string="{json.dumps(isinstance(v, str))}">{_raw(v)}</｜DSML｜parameter>\n'
            for k, v in args.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'

    return (
        "<｜DSML｜function_calls>\n" + "".join(one(*c) for c in calls) + "</｜DSML｜function_calls>"
    )


def _minicpm(name: str, args: dict[str, Any]) -> str:
    values = "".join(
        f'<param name="{k}">{f"<![CDATA[{v}]]>" if isinstance(v, str) else _json(v)}</param>'
        for k, v in args.items()
    )
    return f'<function name="{name}">{values}</function>'


def _kimi_k3(calls: Calls) -> str:
    def one(number: int, name: str, args: dict[str, Any]) -> str:
        values = "".join(
            f'<|open|>argument key="{k}" '
            f'type="{"string" if isinstance(v, str) else "object"}"<|sep|>{_raw(v)}'
            "<|close|>argument<|sep|>"
            for k, v in args.items()
        )
        return f'<|open|>call tool="{name}" index="{number}"<|sep|>{values}<|close|>call<|sep|>'

    return (
        "<|open|>tools<|sep|>"
        + "".join(one(i, *c) for i, c in enumerate(calls, 1))
        + "<|close|>tools<|sep|>"
    )


def _muse(calls: Calls) -> str:
    def one(name: str, args: dict[str, Any]) -> str:
        values = "".join(
            f'<atem:parameter name="{k}">{_raw(v)}</atem:parameter>\n' for k, v in args.items()
        )
        return f'<atem:invoke name="{name}">\n{values}</atem:invoke>\n'

    return (
        f"<|start|>assistant to={calls[0][0]}<|message|><atem:function_calls>\n"
        + "".join(one(*c) for c in calls)
        + "</atem:function_calls>"
    )


def _m3_value(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{M3}<{k}>{_m3_value(v)}{M3}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{M3}<item>{_m3_value(v)}{M3}</item>" for v in value)
    return _raw(value)


def _minimax_m3(calls: Calls) -> str:
    body = "".join(f'{M3}<invoke name="{n}">{_m3_value(a)}{M3}</invoke>\n' for n, a in calls)
    return f"{M3}<tool_call>\n{body}{M3}</tool_call>"


def _cohere(calls: Calls) -> str:
    items = [
        {"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(items, ensure_ascii=False, indent=4)}<|END_ACTION|>"


def _minimax(calls: Calls) -> str:
    def one(name: str, args: dict[str, Any]) -> str:
        values = "".join(f'<parameter name="{k}">{_raw(v)}</parameter>\n' for k, v in args.items())
        return f'<invoke name="{name}">\n{values}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(one(*c) for c in calls) + "</minimax:tool_call>"


def _deepseek(calls: Calls) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _deepseek31(calls: Calls) -> str:
    body = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _harmony(calls: Calls) -> str:
    parts = [
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(a)}"
        for n, a in calls
    ]
    return "<|end|><|start|>assistant".join(parts) + "<|call|>"


def _python(calls: Calls) -> str:
    shown = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"<|tool_call_start|>[{', '.join(shown)}]<|tool_call_end|>"


def _python_with_json(calls: Calls) -> str:
    shown = [f"{n}({', '.join(f'{k}={json.dumps(v)}' for k, v in a.items())})" for n, a in calls]
    return f"<|tool_call_start|>[{', '.join(shown)}]<|tool_call_end|>"


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(v, quote) for v in value) + "]"
    return _json(value)


def _gemma(name: str, args: dict[str, Any]) -> str:
    return f"<start_function_call>call:{name}{_gemma_value(args, '<escape>')}<end_function_call>"


def _gemma4(name: str, args: dict[str, Any]) -> str:
    quote = '<|"|>'
    return f"<|tool_call>call:{name}{_gemma_value(args, quote)}<tool_call|>"


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": (
        "hermes",
        lambda cs: "\n".join(f"<tool_call>\n{_call(n, a)}\n</tool_call>" for n, a in cs),
    ),
    "hermes, tight": (
        "hermes",
        lambda cs: "".join(f"<tool_call>{_call(n, a)}</tool_call>" for n, a in cs),
    ),
    "hermes, arguments first": (
        "hermes",
        lambda cs: "".join(
            f'<tool_call>{{"arguments": {_json(a)}, "name": "{n}"}}</tool_call>' for n, a in cs
        ),
    ),
    "hermes, arguments as text": (
        "hermes",
        lambda cs: "".join(
            f'<tool_call>{{"name": "{n}", "arguments": {json.dumps(_json(a))}}}</tool_call>'
            for n, a in cs
        ),
    ),
    "llama3": ("llama3", lambda cs: "; ".join(_call(n, a, "parameters") for n, a in cs)),
    "llama3, tagged": (
        "llama3",
        lambda cs: "<|python_tag|>" + "; ".join(_call(n, a, "parameters") for n, a in cs),
    ),
    "mistral": (
        "mistral",
        lambda cs: "[TOOL_CALLS][" + ", ".join(_call(n, a) for n, a in cs) + "]",
    ),
    "mistral, new": (
        "mistral",
        lambda cs: "".join(f"[TOOL_CALLS]{n}[ARGS]{_json(a)}" for n, a in cs),
    ),
    "phi": (
        "phi",
        lambda cs: "<|tool_call|>[" + ", ".join(_call(n, a) for n, a in cs) + "]<|/tool_call|>",
    ),
    "deepseek v3": ("deepseek", _deepseek),
    "deepseek v3.1": ("deepseek", _deepseek31),
    "kimi": ("kimi", _kimi),
    "harmony": ("harmony", _harmony),
    "qwen_coder": ("qwen_coder", lambda cs: "\n".join(_qwen_coder(n, a) for n, a in cs)),
    "qwen_coder, outer opening forgotten": (
        "qwen_coder",
        lambda cs: "\n".join(_qwen_coder(n, a).removeprefix("<tool_call>\n") for n, a in cs),
    ),
    "seed": ("seed", lambda cs: "\n".join(_seed(n, a) for n, a in cs)),
    "dsml": ("dsml", _dsml),
    "minicpm": ("minicpm", lambda cs: "\n".join(_minicpm(n, a) for n, a in cs)),
    "kimi_k3": ("kimi_k3", _kimi_k3),
    "muse": ("muse", _muse),
    "minimax_m3": ("minimax_m3", _minimax_m3),
    "cohere": ("cohere", _cohere),
    "nemotron_v2": (
        "nemotron_v2",
        lambda cs: "<TOOLCALL>[" + ", ".join(_call(n, a) for n, a in cs) + "]</TOOLCALL>",
    ),
    "apriel": (
        "apriel",
        lambda cs: "<tool_calls>[" + ", ".join(_call(n, a) for n, a in cs) + "]</tool_calls>",
    ),
    "gigachat": (
        "gigachat",
        lambda cs: "<|function_call|>" + "\n".join(_call(n, a) for n, a in cs),
    ),
    "gigachat, in a role": (
        "gigachat",
        lambda cs: (
            "<|message_sep|>\n\nfunction call<|role_sep|>\n" + "\n".join(_call(n, a) for n, a in cs)
        ),
    ),
    "functionary": (
        "functionary",
        lambda cs: "".join(f"<function={n}>{_json(a)}</function>" for n, a in cs),
    ),
    "minimax_m1": (
        "minimax_m1",
        lambda cs: "<tool_calls>\n" + "".join(_call(n, a) + "\n" for n, a in cs) + "</tool_calls>",
    ),
    "mistral, with ids": (
        "mistral",
        lambda cs: (
            "[TOOL_CALLS]["
            + ", ".join(_call(n, a)[:-1] + ', "id": "abcdefghi"}' for n, a in cs)
            + "]"
        ),
    ),
    "apertus": (
        "apertus",
        lambda cs: (
            "<|tools_prefix|>[" + ", ".join(_json({n: a}) for n, a in cs) + "]<|tools_suffix|>"
        ),
    ),
    "glm": ("glm", lambda cs: "\n".join(_glm(n, a) for n, a in cs)),
    "minimax": ("minimax", _minimax),
    "lfm": ("lfm", _python),
    "lfm, values as JSON": ("lfm", _python_with_json),
    "function_gemma": ("function_gemma", lambda cs: "".join(_gemma(n, a) for n, a in cs)),
    "gemma4": ("gemma4", lambda cs: "".join(_gemma4(n, a) for n, a in cs)),
}
