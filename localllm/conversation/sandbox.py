"""A Jinja environment for templates nobody vetted: no attribute tricks, bounded steps, time and text.

A chat template comes out of a downloaded file and is a program. Jinja's immutable sandbox stops it from reaching
Python's internals (the class of CVE-2024-34359); this module adds what the sandbox leaves open: endless loops and
texts that grow until memory is gone. Every loop turn and every call counts one step and looks at the clock; every
operation that can multiply text is checked before it runs.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE_CHARS = 1 << 20
MAX_TEXT_CHARS = 1 << 24
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_REPEAT = 100_000
_WIDE_FORMAT = re.compile(r"\d{5,}")


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or made too much text."""


class TemplateRaisedError(jinja2.TemplateError):
    """The template itself refused the conversation by `raise_exception(message)`."""


class _Budget(threading.local):
    """What is left of this thread's current rendering."""

    steps: int = MAX_STEPS
    deadline_s: float = float("inf")


_budget = _Budget()


def start_budget(seconds: float = MAX_SECONDS) -> None:
    """Give the calling thread a fresh allowance; call before each rendering."""
    _budget.steps = MAX_STEPS
    _budget.deadline_s = time.monotonic() + seconds


def _tick() -> str:
    _budget.steps -= 1
    if _budget.steps < 0:
        raise TemplateLimitError(f"the chat template took more than {MAX_STEPS} steps")
    if _budget.steps & 63 == 0 and time.monotonic() > _budget.deadline_s:
        raise TemplateLimitError("the chat template took too long")
    return ""


def check_size(value: Any) -> Any:
    """`value`, unless it is a text or a list longer than any prompt could be."""
    if isinstance(value, (str, list, tuple, bytes)) and len(value) > MAX_TEXT_CHARS:
        raise TemplateLimitError(f"the chat template made a text of more than {MAX_TEXT_CHARS} characters")
    return value


def _check_arguments(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call whose result could be far larger than what it was given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_REPEAT and name not in ("strftime_now",):
            raise TemplateLimitError(f"the chat template called {name} with the number {value}")
    texts = [a for a in (owner, *args, *kwargs.values()) if isinstance(a, str)]
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[0], texts[1], texts[2]
        if (text.count(old) if old else len(text) + 1) * len(new) > MAX_TEXT_CHARS:
            raise TemplateLimitError("the chat template's replace would make too much text")
    if name in ("join", "translate") and len(texts) >= 1:
        longest = max((len(t) for t in texts), default=0)
        parts = next((a for a in (owner, *args) if isinstance(a, (list, tuple))), None)
        count = len(parts) if parts is not None else max(map(len, texts))
        if longest * count > MAX_TEXT_CHARS and name == "join":
            raise TemplateLimitError("the chat template's join would make too much text")
    if name in ("format", "format_map", "__mod__") and any(_WIDE_FORMAT.search(t) for t in texts[:1]):
        raise TemplateLimitError("the chat template's format asks for a very wide field")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it off the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _meter(tree: nodes.Template) -> None:
    """Rewrite a parsed template: each loop turn ticks, each operand of `~` is measured.

    `a ~ b` builds a text without a call the sandbox could see, a loop over a list turns without one.
    """
    for loop in list(tree.find_all(nodes.For)):
        tick = nodes.ExprStmt(nodes.Call(nodes.Name("__tick__", "load"), [], [], None, None))
        loop.body.insert(0, tick.set_lineno(loop.lineno, override=True))
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [nodes.Filter(n, "__measured__", [], [], None, None, lineno=n.lineno) for n in concat.nodes]


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with its meters."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            autoescape=False,
        )
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, __tick__=_tick)
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(name, f) for name, f in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _meter(tree)
        return tree

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes passes here."""
        if __obj is _tick:
            return _tick()
        _tick()
        name = getattr(__obj, "__name__", "")
        # The sandbox wraps str.format in a function of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        _check_arguments(owner, name, args, kwargs)
        return check_size(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*`, `**`, `%` and `+` can make a value larger than both sides together."""
        if operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(a, (str, list, tuple)) and isinstance(b, int) and len(a) * b > MAX_TEXT_CHARS:
                    raise TemplateLimitError("the chat template repeats a text too often")
        if operator == "**" and (abs(left) > MAX_REPEAT or abs(right) > 64):
            raise TemplateLimitError("the chat template computes a very large power")
        if operator == "%" and isinstance(left, str):
            _check_arguments(left, "__mod__", (), {})
        _tick()
        result = check_size(super().call_binop(context, operator, left, right))
        if isinstance(result, int) and result.bit_length() > 256:
            raise TemplateLimitError("the chat template computes a very large number")
        return result


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are measured; Jinja's pass_* markers are kept by `wraps`."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        _tick()
        plain = tuple(a for a in args if isinstance(a, (str, int, list, tuple)))
        _check_arguments(None, name, plain, kwargs)
        return check_size(function(*args, **kwargs))

    return measured


def _raise_exception(message: Any = "") -> NoReturn:
    raise TemplateRaisedError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates use
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's chat templates expect it: not HTML-escaped, key order kept."""
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateLimitError(f"the chat template indents JSON by {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,  # type: ignore[arg-type]
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return None
    raise TemplateRaisedError(f"the chat template writes a {type(value).__name__} as JSON")


def compile_template(source: str) -> jinja2.Template:
    """Parse `source`; raises jinja2.TemplateError for one that is too large or not a template."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateLimitError(f"the chat template is larger than {MAX_SOURCE_CHARS} characters")
    env = TemplateEnvironment()
    env.filters["__measured__"] = check_size
    try:
        return env.from_string(source)
    except RecursionError as e:
        raise TemplateLimitError("the chat template is nested too deeply") from e
