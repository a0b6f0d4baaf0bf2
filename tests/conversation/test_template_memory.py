"""What a hostile template may take: numbers are only numbers until they multiply, and memory stays
within its bound."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from localllm.conversation.template import ChatTemplate, TemplateError

_ASKED = [{"role": "user", "content": "x"}]
_PEAK_BYTES = 64 * 2**20


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 120000 | string }}", "120000"),
        ("{{ 9007199254740991 | tojson }}", "9007199254740991"),
        ("{{ {'timeout': 120000} | tojson }}", '{"timeout": 120000}'),
        ("{% macro f(v) %}{{ v }}{% endmacro %}{{ f(9007199254740991) }}", "9007199254740991"),
        ("{{ 'at %d' % 1234567890123 }}", "at 1234567890123"),
        ("{{ '{}/{:>4}'.format(1234567890123, 7) }}", "1234567890123/   7"),
        ("{{ 'code 123456789'.replace('code', 'number') }}", "number 123456789"),
        ("{{ 'zip 123456 %s' % 'x' }}", "zip 123456 x"),
        ("{{ 3000000 * 4 }} {{ 2 ** 10 }}", "12000000 1024"),
        ("{{ [120000, 7] | join(',') }} {{ [120000, 7] | max }}", "120000,7 120000"),
        ("{{ 120000 | default(5) }} {{ 250000.0 | round | int }}", "120000 250000"),
        (
            "{{ 'a\nb' | indent(4) }}|{{ 'a' | center(5) }}|{{ 'ab'.ljust(4) }}",
            "a\n    b|  a  |ab  ",
        ),
    ],
)
def test_a_number_is_only_a_number(source: str, text: str) -> None:
    assert ChatTemplate(source).render(_ASKED) == text


HOSTILE = [
    "{{ 'a'.encode() * 60000000 }}",
    "{{ ('a'.encode() * 60000000) | length }}",
    "{{ ('%s' * 12) % (('a' * 9000000,) * 12) }}",
    "{% set a = 'a' * 9000000 %}{{ '%s%s%s%s%s%s%s%s%s%s%s%s' % (a, a, a, a, a, a, a, a, a, a, a, a) }}",
    "{% set a = 'a' * 9000000 %}{{ '%(a)s%(a)s%(a)s%(a)s%(a)s%(a)s%(a)s%(a)s' % {'a': a} }}",
    "{% set a = 'a' * 9000000 %}{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format(a) }}",
    "{{ '%*d' % (90000000, 1) }}",
    "{{ '%.90000000f' % 1.5 }}",
    "{{ '{:>{w}}'.format(1, w=90000000) }}",
    "{{ '{:.90000000f}'.format(1.5) }}",
    "{{ ('a\n' * 2000) | indent(60000) }}",
    "{{ ('a\n' * 2000) | indent('b' * 60000) }}",
    "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 10000) }}",
    "{{ 'a' | center(90000000) }}",
    "{{ 'a'.rjust(90000000) }}",
    "{{ 'a'.zfill(90000000) }}",
    "{{ ('\t' * 1000).expandtabs(90000) }}",
    "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
    "{{ ('a ' * 8000000).split() | length }}",
    "{{ ('a' * 16000000) | list | length }}",
    "{{ ('\n' * 8000000).splitlines() | length }}",
    "{{ [0] * 16000000 }}",
    "{{ [1] | batch(90000000, 0) | list }}",
    "{{ [1] | slice(90000000) | list }}",
    "{{ ('b' * 4000).join(['a'] * 20000) }}",
    "{{ (['a' * 4000] * 20000) | join }}",
    "{{ ('\\u0000' * 10000000) | tojson }}",
    "{{ ('é' * 7000000) | tojson(ensure_ascii=true) }}",
    "{% set a = 'a' * 9000000 %}{{ a ~ a ~ a ~ a ~ a ~ a ~ a ~ a ~ a ~ a ~ a ~ a }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x ~ 'a' }}",
    "{% set a = [] %}{{ a.append(a) }}{{ a | tojson }}",
    "{% set a = 'a' * 1000000 %}{% set b %}{% for i in range(1000) %}{{ a }}{% endfor %}{% endset %}{{ b | length }}",
    "{% macro m() %}{{ 'a' * 1000000 }}{% endmacro %}{% for i in range(1000) %}{{ m() }}{% endfor %}",
    "{% set b %}{% for i in range(100000) %}" + "a" * 10000 + "{% endfor %}{% endset %}{{ b | length }}",
    "{% set l = [] %}{% for i in range(200) %}{% set _ = l.append('a' * (1000000 + i)) %}{% endfor %}{{ l | length }}",
    "{% set a = 'a' * 9000000 %}{% set l = [] %}{% for i in range(200) %}{% set _ = l.append(a[i:]) %}{% endfor %}{{ l | length }}",
    "{% set l = [] %}{% for i in range(200) %}{% set _ = l.append(('a' * 1000000) | upper) %}{% endfor %}{{ l | length }}",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_is_refused_before_it_takes_the_memory(source: str) -> None:
    template = ChatTemplate(source)
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            template.render(_ASKED)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < _PEAK_BYTES, f"{peak >> 20} MiB"
    assert time.process_time() - started < 10


def test_many_large_texts_one_after_another_are_no_fault() -> None:
    """A template that builds its text turn by turn makes much and holds little."""
    source = (
        "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.content + "
        "'\n' "
        "%}{% endfor %}{{ n.x }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(ChatTemplate(source).render(messages)) == 2000 * 1001
