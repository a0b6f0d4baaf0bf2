"""What a chat template gives away about a model: how it calls tools, and the tags around its reasoning."""

from __future__ import annotations

# Name of a notation and its signs, of which a template shows one (each sign: all of its texts). First match wins: several
# templates mention <tool_call>, so those with a surer sign stand above.
_TOOL_NOTATIONS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("harmony", (("<|channel|>", "functions."),)),
    ("muse-xml", (("<atem:function_calls>",),)),
    ("minimax-m3", (("]<]minimax[>[",),)),
    ("minimax-xml", (("minimax:tool_call",),)),
    ("minimax-m1-json", (("<beginning_of_sentence>ai name=",),)),
    ("kimi-k3", (("<|open|>", "<|sep|>"),)),
    ("kimi", (("<|tool_calls_section_begin|>",),)),
    ("dsml", (("｜DSML｜",),)),
    ("deepseek", (("<｜tool▁calls▁begin｜>",),)),
    ("cohere-json", (("<|START_ACTION|>",),)),
    ("gigachat-json", (("<|function_call|>",), ("'function call'",), ('"function call"',))),
    ("apertus-json", (("<|tools_prefix|>",),)),
    ("minicpm-xml", (("<param name=",),)),
    ("nemotron-v2-json", (("<TOOLCALL>",),)),
    ("apriel-json", (("</tool_calls>",),)),
    ("seed-xml", (("<seed:tool_call>",),)),
    ("functionary-json", (("<function=example_function_name>{",),)),
    ("qwen3-coder-xml", (("<function=",),)),
    ("glm", (("<arg_key>",),)),
    ("lfm2-pythonic", (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",))),
    ("function-gemma", (("<start_function_call>",),)),
    ("gemma4", (("<|tool_call>",),)),
    ("mistral", (("[TOOL_CALLS]",),)),
    ("phi-json", (("<|tool_call|>",),)),
    ("hermes-json", (("<tool_call>",),)),
    ("llama3-json", (("<|python_tag|>",), ("Environment: ipython",))),
)

_REASONING: tuple[tuple[str, tuple[str, str]], ...] = (
    ("<|channel|>analysis", ("<|channel|>analysis", "<|channel|>final")),
    ("<seed:think>", ("<seed:think>", "</seed:think>")),
    ("[THINK]", ("[THINK]", "[/THINK]")),
    ("<think>", ("<think>", "</think>")),
)


def tool_format(template: str) -> str | None:
    """The catalog's name of the tool-call format a chat template writes, None if it shows none known."""
    return next(
        (name for name, signs in _TOOL_NOTATIONS if any(all(text in template for text in sign) for sign in signs)), None
    )


def reasoning_tags(template: str) -> tuple[str, str] | None:
    """Opening and closing marker of the reasoning a chat template knows of, None if it shows none."""
    return next((tags for marker, tags in _REASONING if marker in template), None)
