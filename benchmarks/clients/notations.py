"""The formats of six models, as their publishers document them: thoughts, answers and calls.

They were written by hand from the templates and the publishers' pages, so the tests do not depend
on the server's own formats. Empty reasoning is never written: all of these models reason if their
template allows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Notation:
    """One model: name in the table, template file, control tokens, and a function that writes a
    reply from a thought, an answer and calls. `parallel`: the model writes several calls in one
    reply."""

    name: str
    template: str
    control: tuple[str, ...]
    write: Callable[[str, str, Calls], str]
    parallel: bool = True


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tagged(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        given = "".join(
            f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items()
        )
        written.append(f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>")
    return "\n".join(written)


def _qwen35(thought: str, answer: str, calls: Calls) -> str:
    return f"{thought}\n</think>\n\n{answer}" + ("\n\n" * bool(answer and calls)) + _tagged(calls)


def _qwen_coder(thought: str, answer: str, calls: Calls) -> str:
    return answer + ("\n" * bool(answer and calls)) + _tagged(calls)


def _harmony(thought: str, answer: str, calls: Calls) -> str:
    said = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    if not calls:
        return f"{said}<|channel|>final<|message|>{answer}"
    name, arguments = calls[0]
    return (
        f"{said}<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
    )


def _mistral(thought: str, answer: str, calls: Calls) -> str:
    return answer + "".join(
        f"[TOOL_CALLS]{n}[CALL_ID]000000000[ARGS]{json.dumps(a)}" for n, a in calls
    )


def _glm(thought: str, answer: str, calls: Calls) -> str:
    written = [
        f"<tool_call>{n}"
        + "".join(f"<arg_key>{k}</arg_key><arg_value>{_plain(v)}</arg_value>" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    ]
    return f"{thought}</think>{answer}" + "".join(written)


def _minimax(thought: str, answer: str, calls: Calls) -> str:
    if not calls:
        return f"{thought}\n</think>\n\n{answer}"
    invoked = "".join(
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for n, a in calls
    )
    return f"{thought}\n</think>\n\n{answer}\n<minimax:tool_call>\n{invoked}</minimax:tool_call>"


_HARMONY_TOKENS = (
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

NOTATIONS = (
    Notation("Qwen3.5", "Qwen3.5-4B.jinja", (), _qwen35),
    Notation("Qwen3-Coder", "Qwen3-Coder.jinja", (), _qwen_coder),
    Notation("gpt-oss", "openai-gpt-oss-120b.jinja", _HARMONY_TOKENS, _harmony, parallel=False),
    Notation(
        "Mistral-Small-3.2",
        "Mistral-Small-3.2-24B-Instruct-2506.jinja",
        (
            "[TOOL_CALLS]",
            "[CALL_ID]",
            "[ARGS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CONTENT]",
        ),
        _mistral,
    ),
    Notation("GLM-4.7", "GLM-4.7-Flash.jinja", (), _glm),
    Notation("MiniMax-M2", "MiniMax-M2.jinja", (), _minimax),
)
