"""Requirements of strict templates, each as a reduced template.

A conversation reaches the template complete and in the required form.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from conversation.agent_conversations import LARGEST, TOOLS, conversations, plain_jinja
from localllm.conversation.messages import normalise
from localllm.conversation.template import ChatTemplate, TemplateError

_NAMED = {c.name: c for c in conversations()}

# Writes every turn with its calls and results. The pieces below are put before or inside it.
_BODY = """\
{%- for m in messages %}
{%- if m.tool_calls %}
{%- for c in m.tool_calls %}[call {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}
{%- elif m.role == 'tool' %}[result {{ m.tool_call_id }} {{ m.content }}]
{%- else %}[{{ m.role }} {{ m.content }}]{%- endif %}
{%- endfor %}"""
NINE = (
    """{%- for m in messages %}
{%- for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{% endfor %}
{%- if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}
{%- endfor %}"""
    + _BODY
)
ONE_CALL = (
    """{%- for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one!') }}
{%- endif %}{% endfor %}"""
    + _BODY
)


def _render(source: str, name: str, **changes: Any) -> str:
    c = _NAMED[name]
    return ChatTemplate(source).render(
        normalise(copy.deepcopy(c.messages)), tools=changes.get("tools", c.tools)
    )


def test_call_ids_become_nine_letters_the_same_for_call_and_result() -> None:
    text = _render(NINE, "parallel calls")
    calls, results = re.findall(r"\[call (\w+) ", text), re.findall(r"\[result (\w+) ", text)
    assert calls == results
    assert len(set(calls)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", c) for c in calls)
    # the prompt must be the same every turn, or no prefix is found in the cache
    assert _render(NINE, "parallel calls") == text


def test_a_short_id_stays_and_a_result_without_an_id_gets_that_of_its_call() -> None:
    call = {"id": "abcDEF123", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {**call, "id": "a much longer one"}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
    ]
    text = ChatTemplate(NINE).render(normalise(messages))
    calls = re.findall(r"\[call (\w+) ", text)
    assert calls[0] == "abcDEF123"
    assert re.findall(r"\[result (\w+) (\w+)", text) == [(calls[0], "first"), (calls[1], "second")]


def test_ids_stay_if_the_template_accepts_them() -> None:
    assert "call_7f3kQ0aZrWcP5mYtB2nE" in _render(_BODY, "loop")


def test_parallel_calls_become_turns_of_one_call_each_followed_by_its_result() -> None:
    text = _render(ONE_CALL, "parallel calls")
    assert re.findall(r"\[(call|result)", text) == ["call", "result", "call", "result"]
    assert (
        text.index("Paris")
        < text.index("18 degrees")
        < text.index("Oslo")
        < text.index("4 degrees]")
    )


def test_results_in_another_order_follow_their_own_call() -> None:
    c = _NAMED["parallel calls"]
    messages = [*c.messages[:2], *reversed(c.messages[2:])]
    text = ChatTemplate(ONE_CALL).render(normalise(messages), tools=c.tools)
    assert text.index("18 degrees") < text.index("Oslo") < text.index("4 degrees]")


def test_arguments_are_text_if_the_template_concatenates_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '>' + "
        "c.function.arguments "
        "}}{% endfor %}{% endfor %}"
    )
    text = _render(source, "loop with large numbers")
    assert json.loads(text.split(">")[1])["timeout"] == 120000
    assert json.loads(text.split(">")[2])["days"] == LARGEST


@pytest.mark.parametrize(
    "source",
    [
        # loops without a check: None cannot be iterated, so an empty list is needed
        "{% for t in tools %}{{ t.function.name }} {% endfor %}",
        "{% if tools is not none %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif "
        "%}",
        "{% if tools is defined and tools is not none %}{% for t in tools %}{{ t.function.name }} "
        "{% endfor %}{% endif %}",
    ],
)
def test_missing_tools_are_none_or_undefined_as_the_template_requires(source: str) -> None:
    assert _render(source, "one") == ""
    assert _render(source, "tools") == "get_weather run_command "


def test_parameters_without_a_description_get_an_empty_one_if_the_template_concatenates_it() -> (
    None
):
    source = (
        "{% for t in tools %}{% for n, p in t.function.parameters.properties.items() %}"
        "{{ n + ':' + p.description }};{% endfor %}{% endfor %}"
    )
    assert _render(source, "tools").startswith("city:which city;days:;")


def test_a_generator_is_written_as_json() -> None:
    source = "{{ tools | map(attribute='function') | tojson }}"
    assert [f["name"] for f in json.loads(_render(source, "tools"))] == [
        "get_weather",
        "run_command",
    ]


def test_older_variables_are_passed_if_the_template_needs_them() -> None:
    text = _render("{{ functions + ' today ' + datetime }}", "tools")
    listed, _, day = text.partition(" today ")
    assert json.loads(listed)[0]["name"] == "get_weather"
    assert re.search(r"\d{4}", day)


def test_a_template_keeps_a_list_of_its_own() -> None:
    source = (
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% set _ = ns.ids.append(c.id) %}{% endfor %}{% if m.role == 'tool' %}{{ ns.ids.pop(0) "
        "}} {% endif %}{% endfor %}"
    )
    assert _render(source, "parallel calls") == (
        "call_7f3kQ0aZrWcP5mYtB2nE call_9d1hJ4xUsVbN8kLgT6oR "
    )


def test_a_template_never_changes_what_it_was_given() -> None:
    messages = [{"role": "user", "content": "x"}]
    tools = copy.deepcopy(TOOLS)
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages.append(1) }}").render(messages)
    with pytest.raises(TemplateError):
        ChatTemplate("{{ tools[0].function.parameters.required.append('x') }}").render(
            messages, tools=tools
        )
    assert messages == [{"role": "user", "content": "x"}]
    assert tools == TOOLS


THINKING = """{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('either!') }}
{%- endif %}{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }};{% endfor %}"""


def test_reasoning_is_passed_as_thinking_if_the_template_reads_that_name() -> None:
    assert "(A greeting.)Good morning" in _render(THINKING, "thinking before a user turn")


def test_text_and_reasoning_before_a_call_are_joined_if_the_template_refuses_both() -> None:
    assert "(Oslo is next.\n\nNow Oslo.)" in _render(THINKING, "thinking in a loop")


def test_a_conversation_refused_in_every_form_is_refused_as_sent() -> None:
    source = "{{ raise_exception(messages | length ~ ' turns from ' ~ messages[0].role) }}"
    with pytest.raises(TemplateError, match="5 turns from system"):
        _render(source, "late system")


@pytest.mark.parametrize("name", list(_NAMED))
def test_a_template_that_takes_everything_gets_it_as_sent(name: str) -> None:
    c = _NAMED[name]
    assert _render(_BODY, name) == plain_jinja(_BODY, normalise(copy.deepcopy(c.messages)), c.tools)


@pytest.mark.parametrize("source", [NINE, ONE_CALL, THINKING])
@pytest.mark.parametrize("name", list(_NAMED))
def test_every_conversation_reaches_every_strict_template(source: str, name: str) -> None:
    questions = [
        m["content"]
        for m in _NAMED[name].messages
        if m["role"] == "user" and isinstance(m["content"], str)
    ]
    text = _render(source, name)
    assert all(q in text for q in questions)
