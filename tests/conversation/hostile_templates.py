"""Chat templates that demand much memory or time.

Each combines a growing operator, a size and a place in the template.

`python -m conversation.hostile_templates` runs all of them within small limits. It prints, as
JSON, how each ended, and the memory and time that all took.
"""

from __future__ import annotations

import json
import resource
import sys
from itertools import product

from localllm.limited_child import ChildLimits, LimitedChild, OverLimitError, RefusedError

PROGRAM = "localllm.conversation.sandbox"
LIMITS = ChildLimits(cpu_s=0.03, memory_bytes=32 * 2**20, spare_bytes=32 * 2**20)
# The number of places tried for each operator.
_TRIED = 5
_SIZES = (20_000, 3_000_000, 400_000_000)
_OPERATORS = (
    "'a' * N", "[0] * N", "'a' * N + 'b' * N", "'a' * N ~ 'é' * N", "3 ** N", "(3 ** N) // 7",
    "(3 ** N) % 7", "('f' * N) | int(base=16)", "'%Nd' % 1", "'%.Nf' | format(1.5)",
    "'{:>N}'.format(1)", "(['a'] * N) | join('b' * 9)", "('a' * N) | replace('a', 'b' * 99)",
    "('a\n' * N) | indent(N)", "'a' | center(N)", "'a'.zfill(N)", "('\t' * N).expandtabs(N)",
    "('a' * N).translate({97: 'b' * 99})", "('a ' * N) | wordwrap(1, wrapstring='b' * 99)",
    "('a ' * N) | title", "('é' * N).upper()", "('a' * N) | list", "('a b ' * N).split()",
    "range(99999) | list", "(range(99999) | list) + [N]", "([['b', 'a']] * N) | sort",
    "([{'x': 'a'}] * N) | groupby('x') | list", "([[1]] * N) | sum(start=[])",
    "('a' * N)[::-1]", "([0] * N)[:-1]", "[" + "N," * 30_000 + "]", "{" + "N:[]," * 20_000 + "}",
    "('é' * N) | tojson(ensure_ascii=true)", "messages | tojson(indent=N)",
    "strftime_now('%A' * N)", "('a' * N) | urlencode", "lipsum(n=N)", "[1] | batch(N, 0) | list",
    "(('a' * 999) * N).find('a' * 999 ~ 'b')", "('a' * N).encode('punycode')",
)  # fmt: skip
_PLACES = (
    "{{ X }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = X %}{% endfor %}{% endfor %}",
    "{% set l = [] %}{% for i in range(99999) %}{% set _ = l.append(X) %}{% endfor %}{{ l == l }}",
    "{% set n = namespace(x=X, y=X) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "{% macro m(x) %}{{ m([x, X]) }}{% endmacro %}{{ m(1) }}",
    "{% set c = cycler(X, X) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "{% set b %}{% for i in range(99999) %}{{ X }}{% endfor %}{% endset %}{{ b }}",
)
# Sources that no operator makes: long, deeply nested, and using hooks that the sandbox once had.
_SOURCES = (
    "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}",
    "{{ a" + ".b" * 100_000 + " }}",
    "{{ 'a'" + "|upper" * 50_000 + " }}",
    "{% if a %}" * 3_000 + "{% endif %}" * 3_000,
    "".join(f"{{% macro m{i} %}}x{{% endmacro %}}" for i in range(20_000)),
    "{{ " + "9" * 400_000 + " }}",
    "{{ __tick__(-10**15) }}{{ 'a' * 3000000000 }}",
    "{{ self.__tick__ }}{{ messages | __concat__ }}",
)


def templates() -> list[str]:
    """Return all sources: each operator in five of the seven places, and those without operators.

    The places rotate from operator to operator, and so do the sizes.
    """
    pairs = product(enumerate(_OPERATORS), enumerate(_PLACES))
    chosen = [(one, place) for (i, one), (j, place) in pairs if (i + j) % len(_PLACES) < _TRIED]
    return [
        place.replace("X", operator.replace("N", str(_SIZES[i % len(_SIZES)])))
        for i, (operator, place) in enumerate(chosen)
    ] + list(_SOURCES)


def question(source: str) -> dict[str, object]:
    """Return the input of the program."""
    messages = [{"role": "user", "content": "x"}]
    return {"source": source, "messages": messages, "tools": None, "variables": {}}


def ending(child: LimitedChild, source: str) -> str:
    """Return how the rendering ends. Any other error is raised, since a template must not cause
    it."""
    try:
        child.ask(question(source))
    except OverLimitError:
        return "stopped"
    except RefusedError:
        return "refused"
    return "rendered"


def taken() -> tuple[int, float]:
    """Return the largest memory of any child process in bytes, and the processor time of all."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_maxrss * 1024, used.ru_utime + used.ru_stime


def main() -> None:
    resting = LimitedChild(PROGRAM, LIMITS)
    ending(resting, "{{ messages[0].content }}")
    resting.close()
    rest_bytes, rest_s = taken()
    child = LimitedChild(PROGRAM, LIMITS)
    ends = [ending(child, source) for source in templates()]
    last = child.ask(question("{{ messages[0].content }}"))
    child.close()
    peak_bytes, spent_s = taken()
    said = {
        "ends": ends, "last": last, "bytes": peak_bytes - rest_bytes, "seconds": spent_s - rest_s
    }  # fmt: skip
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
