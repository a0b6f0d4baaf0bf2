"""Parameters between tags may come in any order that the model chooses.

No optional parameter is lost if it follows another one, and no required parameter may be
missing.
"""

from __future__ import annotations

from typing import Any

import pytest

from conversation.call_law import LawError, check_read, held, obeyed, planned
from conversation.call_templates import TEMPLATES
from localllm.conversation.template import ChatTemplate

TAGGED = [
    "qwen_coder",
    "glm",
    "minimax",
    "seed",
    "muse",
    "dsml",
    "minicpm",
    "kimi_k3",
    "lfm",
    "minimax_m3",
]
ALL = {
    "path": "a.c",
    "text": "x\ny",
    "line": 3,
    "fuzzy": True,
    "mode": "fast",
    "depth": 2,
    "name": "b",
}


def tools(*required: str, among: int = len(ALL)) -> list[dict[str, Any]]:
    types = {str: "string", int: "integer", bool: "boolean"}
    properties = {k: {"type": types[type(v)]} for k, v in list(ALL.items())[:among]}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return [
        {"type": "function", "function": {"name": "edit", "description": "", "parameters": schema}}
    ]


@pytest.mark.parametrize("style", TAGGED)
class TestOrder:
    def obeyed(self, style: str, offered: list[dict[str, Any]], *orders: str) -> list[str]:
        template = ChatTemplate(
            next(text for name, text in TEMPLATES.items() if name.partition(",")[0] == style)
        )
        prompt = planned(template, offered)
        return [
            obeyed(template, offered, [("edit", {k: ALL[k] for k in o.split()})], prompt)
            for o in orders
        ]

    def test_a_few_parameters_may_come_in_any_order(self, style: str) -> None:
        orders = (
            "path text line",
            "text path",
            "line text path",
            "text line path fuzzy",
            "fuzzy path line text",
        )
        assert all(self.obeyed(style, tools("path", "text", among=4), *orders))

    def test_optional_parameters_of_many_may_follow_later_ones(self, style: str) -> None:
        orders = ("path", "path name mode", "path depth line fuzzy", "path text name mode line")
        assert all(self.obeyed(style, tools("path"), *orders))

    @pytest.mark.parametrize("among", [4, len(ALL)])
    def test_required_parameters_may_not_be_left_out(self, style: str, among: int) -> None:
        with pytest.raises(LawError):
            self.obeyed(style, tools("path", "text", among=among), "path line")


@pytest.mark.parametrize(
    ("style", "closing"), [("qwen_coder", "</tool_call>"), ("seed", "</seed:tool_call>")]
)
def test_a_call_without_its_outer_tag_is_constrained_too(style: str, closing: str) -> None:
    template = ChatTemplate(
        next(text for name, text in TEMPLATES.items() if name.partition(",")[0] == style)
    )
    offered = tools("path", among=1)
    prompt = planned(template, offered)
    around = "\n" if style == "qwen_coder" else ""
    call = (
        f"<function=edit>\n<parameter=path>{around}a.c{around}</parameter>\n</function>\n{closing}"
    )
    for said in (call, f"{call}\n{call}"):
        assert held(prompt.answer.calls, said) == said
        check_read(prompt.answer.reply, said, [("edit", {"path": "a.c"})] * said.count(closing))
    for wrong in ("<function=edit>\n</function>", "<function=edit>\n<parameter=line>"):
        with pytest.raises(LawError, match="accepted"):
            held(prompt.answer.calls, wrong)
    with pytest.raises(LawError, match="behind the last call"):
        held(prompt.answer.calls, "You write <function=name> to call.")
