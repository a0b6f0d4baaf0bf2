"""Templates of downloaded files run within limits of memory and time.

The operating system enforces the limits. The next template finds the renderer unchanged.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.conversation.template import ChatTemplate, TemplateError
from localllm.limited_child import ChildLimits, LimitedChild, OverLimitError

if sys.platform != "linux":
    pytest.skip("the measure is Linux's", allow_module_level=True)

from conversation.hostile_templates import LIMITS, PROGRAM, question, templates


def test_no_template_takes_more_than_its_limits() -> None:
    command = [sys.executable, "-m", "conversation.hostile_templates"]
    said = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[1], check=True)
    found = json.loads(said.stdout)
    assert len(found["ends"]) == len(templates()) >= 200
    assert found["ends"].count("stopped") >= 100, "they ask for little"
    assert found["last"] == "x"
    most_bytes = LIMITS.memory_bytes + LIMITS.spare_bytes
    assert found["bytes"] <= most_bytes + 8 * 2**20, f"{found['bytes'] >> 20} MiB"
    assert found["seconds"] <= (LIMITS.cpu_s + 0.02) * len(templates())


def test_a_question_too_large_to_read_does_not_affect_the_next_question() -> None:
    child = LimitedChild(PROGRAM, ChildLimits(cpu_s=5, memory_bytes=2**20, spare_bytes=2**22))
    with pytest.raises(OverLimitError):
        child.ask(question("a" * 2**25))
    assert child.ask(question("{{ messages[0].content }}")) == "x"
    child.close()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 9007199254740991 | tojson }} {{ {'a': 2 ** 100} | tojson }}",
         '9007199254740991 {"a": 1267650600228229401496703205376}'),
        ("{{ '%d/%s' % (1234567890123, 'x') }} {{ '{:>4}'.format(7) }}", "1234567890123/x    7"),
        ("{{ 'a\nb' | indent(4) }}|{{ 'a' | center(5) }}|{{ 'ab'.ljust(4) }}",
         "a\n    b|  a  |ab  "),
        ("{% set l = [] %}{% set _ = l.append(1) %}{{ l }} {{ ['b', 'a'] | sort | join }}",
         "[1] ab"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}{{ nothing }}", "x"),
        ("{{ {'a': nothing, 'b': [1] | map('string')} | tojson(separators=[',', ':']) }}",
         '{"a":null,"b":["1"]}'),
    ],
)  # fmt: skip
def test_templates_produce_the_output_of_jinja(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == text


def test_a_text_that_grows_with_each_message_is_within_the_limits() -> None:
    source = (
        "{% set n = namespace(x='', kept=[]) %}{% for m in messages %}{% set n.x = n.x + m.content "
        "%}{% set n.kept = n.kept + [m.role] %}{% endfor %}{{ n.x ~ n.kept | length }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    assert len(ChatTemplate(source).render(messages)) == 1000 * 1000 + 4


def test_a_conversation_larger_than_any_context_is_an_error_that_does_not_blame_the_template() -> (
    None
):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TemplateError) as refused:
        template.render([{"role": "user", "content": "word " * 200_000}] * 10)
    assert "template" not in str(refused.value)
    assert "8,388,608 characters" in str(refused.value)
