"""From a template to the reading of a reply.

The tests check which format is selected, and the behaviour if none is known.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from conversation.test_cut_replies import told
from conversation.test_tool_formats import TOOLS
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools import has_unknown_format, reasoning_markers
from localllm.conversation.tools.prompt import Choice
from localllm.errors import UnsupportedError
from localllm.server.generation.prompt import Prompt, ResponseOptions, build_prompt

ASKED = [{"role": "user", "content": "Hello"}]
SAY = "{% for m in messages %}{{ m.content }}{% endfor %}"
FOREIGN = SAY + "{% if tools %}call: ((name, arguments)){% endif %}"


def built(template: str, mode: str = "auto") -> Prompt:
    return asyncio.run(
        build_prompt(
            ChatTemplate(template), ASKED, ResponseOptions(tools=TOOLS, choice=Choice(mode))
        )
    )


def read(
    prompt: Prompt, reply: str, cut: bool = False
) -> tuple[str, str, list[tuple[str, object]]]:
    style = prompt.answer.reply
    whole, letters = told(style, [reply], cut), told(style, list(reply), cut)
    assert whole == letters
    return whole[0], whole[1], [(n, json.loads(a)) for n, a in whole[2]]


def test_tools_are_refused_if_the_template_requests_an_unknown_call_format() -> None:
    assert has_unknown_format(FOREIGN)
    with pytest.raises(UnsupportedError, match="tool-call format") as refused:
        built(FOREIGN)
    assert refused.value.param == "tools"
    built(FOREIGN, "none")  # the conversation itself still works


def test_a_template_that_offers_no_tools_is_not_refused() -> None:
    assert not has_unknown_format(SAY)
    assert read(built(SAY), '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>')[2] == [
        ("f", {"n": 1})
    ]


def test_a_model_prompted_with_the_default_format_may_still_write_its_own() -> None:
    # Like DeepSeek R1's distillates: the template writes calls of earlier turns, but offers no
    # tools.
    prompt = built(SAY + "{# <｜tool▁calls▁begin｜> #}")
    own = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": '
        "1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert read(prompt, own) == ("", "", [("f", {"n": 1})])
    assert read(prompt, '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>')[2] == [
        ("f", {"n": 1})
    ]
    assert prompt.answer.control


def test_the_tool_list_of_lfm_2_is_enough_to_detect_its_call_format() -> None:
    prompt = built(
        SAY + "{% if tools %}List of tools: <|tool_list_start|>[{{ tools "
        "}}]<|tool_list_end|>{% "
        "endif "
        "%}"
    )
    assert read(prompt, "<|tool_call_start|>[f(n=1, on=True)]<|tool_call_end|>")[2] == [
        ("f", {"n": 1, "on": True})
    ]


def test_a_header_that_the_prompt_begins_is_continued_in_the_reply() -> None:
    harmony = built(SAY + "{% if tools %}<|channel|>{% endif %}<|start|>assistant")
    call = ' to=functions.f<|channel|>analysis <|constrain|>json<|message|>{"n": 1}<|call|>'
    assert read(harmony, call) == ("", "", [("f", {"n": 1})])
    assert read(harmony, "<|channel|>analysis<|message|>So.<|end|>") == ("", "So.", [])
    assert read(harmony, " to=functions.", cut=True) == ("", "", [])
    muse = built(SAY + "{% if tools %}<atem:function_calls>{% endif %}<|start|>assistant")
    assert read(muse, " to=user<|message|>Hello.<|eot|>") == ("Hello.", "", [])
    parameters = '<atem:invoke name="f"><atem:parameter name="n">1</atem:parameter></atem:invoke>'
    call = f" to=f<|message|><atem:function_calls>{parameters}</atem:function_calls>"
    assert read(muse, call) == ("", "", [("f", {"n": 1})])


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        # the format has reasoning markers
        ("<|channel|>analysis", ("<|channel|>analysis<|message|>", "<|end|>")),
        # the format's markers, if the template contains them
        ("[TOOL_CALLS] [THINK] [/THINK]", ("[THINK]", "[/THINK]")),
        ("[TOOL_CALLS]", None),
        ("<tool_call> <think> </think>", ("<think>", "</think>")),
        (
            "Here are my reasoning steps: [BEGIN FINAL RESPONSE]",
            ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ),
        ("<thinking> </thinking>", ("<thinking>", "</thinking>")),
        (SAY, None),
    ],
)
def test_reasoning_markers_come_from_the_format_or_the_template(
    template: str, markers: tuple[str, str] | None
) -> None:
    assert reasoning_markers(template) == markers
