"""llama.cpp's own cases for parsing an answer, run through the parser of our server.

The cases are not in this repository: set LOCALLLM_LLAMA_CPP_SOURCE to a llama.cpp source tree. Each
case uses the server's own plan of an answer (template, tools and options). The model's text is
parsed in one piece, character by character, and truncated at every character.

Some differences are deliberate. Reasoning is always separate, so if a case keeps it in the answer,
both are joined before the comparison. A continued answer contains only the new text, without the
text that the client sent. A truncated call is not a call, so a case of a partial reply may lack its
last call. Ids are ours. A required call is parsed like an optional one: the server writes its
beginning itself.

"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.cpp_cases import Case, Found, read_cases, tool_of
from localllm.conversation.messages import normalise
from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools.prompt import Choice, checked_tools
from localllm.errors import LocalLLMError
from localllm.server.generation.prompt import ResponseOptions, build_prompt

# The catalog's family for each beginning of a template's file name. Templates of other families are
# not listed.
FAMILIES = {
    "ByteDance-Seed-OSS": "seed",
    "GLM-": "glm",
    "HuggingFaceTB-SmolLM3": "smollm3",
    "LFM2": "lfm2",
    "MiniMax-M": "minimax",
    "Mistral-Small-3.2": "mistral",
    "NVIDIA-Nemotron": "nemotron",
    "Qwen-Qwen2.5": "qwen2.5-coder",
    "Qwen-Qwen3": "qwen3",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5": "qwen3.5",
    "StepFun3.5": "step",
    "deepseek-ai-DeepSeek-R1-Distill": "deepseek-r1-distill",
    "google-gemma-4": "gemma-4",
    "ibm-granite": "granite",
    "inclusionai-ling": "ling",
    "meta-llama-Llama-3": "llama-3",
    "microsoft-Phi": "phi",
    "mistralai-": "mistral",
    "muse-": "muse",
    "openai-gpt-oss": "gpt-oss",
    "poolside-Laguna": "laguna",
    "unsloth-mistral-Devstral": "mistral",
}
# Text that no answer may contain: tags of calls or reasoning, or control tokens.
_TAG = re.compile(
    r"<\|[^|<>\s]{2,40}\|>|</?(?:tool_call|think|function|parameter|arg_key|arg_value)\b[^<>]{0,40}>|\[/?THINK\]"
)
# Two characters of a marker at the end of a truncated answer may be an operator of a programming
# language ("<|"), and are shown.
_BRACKETS = 2
# The value in llama.cpp's cases, also the default, that keeps reasoning in the answer.
_LEFT_IN = "COMMON_REASONING_FORMAT_NONE"
_USER = {"role": "user", "content": "Hey there!"}
Calls = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A parsed answer: text, reasoning, and calls with their arguments as JSON text."""

    content: str
    reasoning: str
    calls: Calls

    def said(self) -> tuple[str, str, list[Any]]:
        """Return a form for comparison, with stripped texts and arguments as values."""
        return self.content.strip(), self.reasoning.strip(), [(n, _value(a)) for n, a in self.calls]


@dataclass(slots=True)
class Result:
    """The result of a case: its faults in words, and the parsed answer."""

    case: Case
    faults: list[str] = field(default_factory=list)
    got: Reading | None = None

    @property
    def family(self) -> str | None:
        """Return the catalog's family of the case's template, or None."""
        stem = Path(self.case.template).stem
        return next((family for begin, family in FAMILIES.items() if stem.startswith(begin)), None)


def found_in(source: Path) -> Found:
    """Return the cases of a llama.cpp source tree."""
    return read_cases(source / "tests" / "test-chat.cpp")


def run(case: Case, source: Path) -> Result:
    """Parse a case's answer in every way."""
    result = Result(case)
    try:
        reply = _plan(case, source)
    except LocalLLMError as e:
        result.faults.append(f"refused: {e}")
        return result
    partial = bool(case.settings.get("is_partial"))
    got = result.got = read(reply, [case.said], cut=partial)
    if not any(_agree(got, wanted, partial) for wanted in _wanted(case, reply)):
        result.faults.append("read otherwise")
    if read(reply, list(case.said), cut=partial).said() != got.said():
        result.faults.append("read otherwise by letters")
    if tags := [tag for tag in _TAG.findall(got.content) if tag not in case.content]:
        result.faults.append(f"in the answer: {' '.join(tags)}")
    whole = read(reply, [case.said])
    for end in range(len(case.said)):
        fault = _cut_fault(read(reply, [case.said[:end]], cut=True), whole)
        if fault is not None:
            result.faults.append(f"cut behind {case.said[max(0, end - 30) : end]!r}: {fault}")
            break
    return result


def read(reply: ReplyFormat, pieces: Sequence[str], cut: bool = False) -> Reading:
    """Parse an answer that arrives in `pieces`, as the server does for its client. If it is `cut`,
    omit an incomplete last call, as the server does (in a stream it marks such a call)."""
    parser = ReplyParser(reply)
    deltas: list[Delta] = [d for piece in pieces for d in parser.feed(piece)] + parser.close(cut)
    calls: Calls = []
    for d in deltas:
        if isinstance(d, CallStart):
            calls.append((d.name, ""))
        elif isinstance(d, CallArguments):
            calls[d.index] = (calls[d.index][0], calls[d.index][1] + d.text)
    if cut and calls and not isinstance(_value(calls[-1][1]), dict):
        calls.pop()
    content = "".join(d.text for d in deltas if isinstance(d, Content))
    return Reading(content, "".join(d.text for d in deltas if isinstance(d, ReasoningText)), calls)


def _plan(case: Case, source: Path) -> ReplyFormat:
    settings = case.settings
    tools = checked_tools([tool_of(t) for t in settings.get("tools", ())])
    schema = settings.get("json_schema")
    wishes = ResponseOptions(
        tools=tools,
        choice=Choice("auto" if tools else "none"),
        parallel=settings.get("parallel_tool_calls", False),
        grammar=("json_schema", schema) if schema else None,
        template_kwargs={"enable_thinking": settings.get("enable_thinking", True)},
        continues="continue_final_message" in settings,
    )
    template = _template(source / case.template)
    return asyncio.run(
        build_prompt(template, normalise(_messages(case, template)), wishes)
    ).answer.reply


@lru_cache
def _template(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"))


def _messages(case: Case, template: ChatTemplate) -> list[dict[str, Any]]:
    sent = [_sent(m) for m in case.settings.get("messages", ())] or [_USER]
    if case.settings.get("continue_final_message") == "COMMON_CHAT_CONTINUATION_REASONING":
        # A client of ours continues a thought by opening it in the answer's own text.
        plain = asyncio.run(
            build_prompt(template, normalise([_USER]), ResponseOptions())
        ).answer.reply
        opening = plain.think[0] if plain.think is not None else ""
        sent[-1] = {"role": "assistant", "content": opening + sent[-1]["reasoning_content"]}
    return sent


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return one of the file's messages as a client sends it."""
    sent = {
        k: v
        for k, v in message.items()
        if v and k in ("role", "content", "reasoning_content", "tool_call_id")
    }
    calls = [
        {"id": c[2], "type": "function", "function": {"name": c[0], "arguments": c[1]}}
        for c in message["tool_calls"]
    ]
    return {"content": "", **sent, **({"tool_calls": calls} if calls else {})}


def _wanted(case: Case, reply: ReplyFormat) -> Iterator[Reading]:
    """Yield the reading that the case expects, and, if it keeps reasoning in the answer, the same
    with separate reasoning."""
    content, reasoning = case.content, case.reasoning
    if "continue_final_message" in case.settings:
        begun = case.settings["messages"][-1]
        content = content.removeprefix(begun["content"])
        reasoning = reasoning.removeprefix(begun["reasoning_content"])
    yield Reading(content, reasoning, list(case.calls))
    left_in = case.settings.get("reasoning_format", _LEFT_IN) == _LEFT_IN
    if reply.think is None or not left_in or reasoning:
        return
    opening, closing = reply.think
    thought, closed, text = content.partition(closing)
    if closed or reply.thinking:
        yield Reading(text, thought.strip().removeprefix(opening), list(case.calls))


def _agree(got: Reading, wanted: Reading, partial: bool) -> bool:
    ours, theirs = got.said(), wanted.said()
    if not partial:
        return ours == theirs
    whole = [(n, a) for n, a in theirs[2] if isinstance(a, dict)]
    return ours[:2] == theirs[:2] and ours[2] == whole


def _cut_fault(part: Reading, whole: Reading) -> str | None:
    """Return the fault of a truncated answer, compared with the complete one, or None."""
    if part.said()[2] != whole.said()[2][: len(part.calls)]:
        return f"the call {part.calls[-1]}"
    for ours, all_ in ((part.content, whole.content), (part.reasoning, whole.reasoning)):
        if not any(all_.startswith(ours[: len(ours) - n].rstrip()) for n in range(_BRACKETS + 1)):
            return f"the text {ours[-60:]!r}"
    return None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def report(results: Sequence[Result]) -> str:
    """Return counts by template, those of the catalog's families first, and every case that
    fails."""
    lines: list[str] = []
    for title, of_catalog in (("families in the catalog", True), ("others", False)):
        chosen = [r for r in results if (r.family is not None) == of_catalog]
        lines.append(f"{title}: {_share(chosen)}")
        by_template: dict[str, list[Result]] = defaultdict(list)
        for result in chosen:
            by_template[Path(result.case.template).stem].append(result)
        lines += [f"  {stem:52} {_share(group)}" for stem, group in sorted(by_template.items())]
    lines.append(f"all: {_share(results)}")
    for result in (r for r in results if r.faults):
        case = result.case
        lines += [f"\n{case.name}: {'; '.join(result.faults)}", f"  said     {case.said!r}"]
        lines.append(f"  expected {(case.content, case.reasoning, list(case.calls))!r}")
        if result.got is not None:
            lines.append(
                f"  got      {(result.got.content, result.got.reasoning, result.got.calls)!r}"
            )
    return "\n".join(lines)


def _share(results: Sequence[Result]) -> str:
    passed = sum(not r.faults for r in results)
    return f"{passed} of {len(results)}" + (f" ({passed / len(results):.1%})" if results else "")


def main() -> None:
    """Run all cases, or those whose template name contains a word, and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the template's file name")
    asked = parser.parse_args()
    root = os.environ.get("LOCALLLM_LLAMA_CPP_SOURCE")
    if not root:
        raise SystemExit(
            "LOCALLLM_LLAMA_CPP_SOURCE must name a llama.cpp source tree, for its "
            "tests/test-chat.cpp"
        )
    source = Path(root)
    found = found_in(source)
    written = len({c.line for c in found.cases})
    print(
        f"{len(found.cases)} cases, written down as {written}; {len(found.unread)} could not be "
        "read"
    )
    for line, why in found.unread:
        print(f"  line {line}: {why}")
    print(report([run(c, source) for c in found.cases if asked.only.lower() in c.template.lower()]))


if __name__ == "__main__":
    main()
