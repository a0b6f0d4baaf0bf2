"""A Jinja sandbox for untrusted chat templates: no attribute tricks, bounded steps, time and text.

A chat template comes out of a downloaded file and is a program. Jinja's immutable sandbox stops it
from reaching Python's internals (the class of CVE-2024-34359); this module adds what the sandbox
leaves open: endless loops and texts that grow until memory is gone. Every loop turn and every call
counts one step and looks at the clock; every operation that can multiply text is measured
(sandbox_limits.py) before it runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.conversation import sandbox_limits as limits
from localllm.conversation.sandbox_limits import TemplateLimitError

MAX_SOURCE_CHARS = 1 << 20
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_WRITTEN_BYTES = 2 * limits.MAX_TEXT_BYTES
MAX_HELD_BYTES = 2 * limits.MAX_TEXT_BYTES
# What a value counts for besides its own bytes: the lists and tables that remember it.
_REMEMBERED_BYTES = 64
MAX_DEFINITIONS = 500
_LONGEST_TIME_FORMAT = 256
# Parts that an object of Jinja's own counts for where it stands in a list: an iterator takes half a
# kilobyte.
_OBJECT_PARTS = 8
# Longer numbers are refused before anybody reads them: Python takes 4,300 digits, and says so in
# its own words.
_LONG_NUMBER = re.compile(r"[0-9_]{400}")
# What a list may come to with all that is in it, the same part counted as often as it is there: so
# long a comparison takes.
MAX_PARTS = 250_000
# Ways to multiply text that no chat template needs: llama.cpp's own engine (common/jinja), on which
# each runs, lacks them.
_UNUSED_FILTERS = ("batch", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_UNUSED_METHODS = frozenset(
    {"encode", "expandtabs", "format_map", "to_bytes", "translate", "zfill"}
)


class TemplateRaisedError(jinja2.TemplateError):
    """The template itself refused the conversation by `raise_exception(message)`."""


class _RenderBudget(threading.local):
    """What is left of this thread's current rendering, and the values it made that may still be in
    use (`held`), with how many parts lists of them have (`parts`, by id); `given` are the ids of
    the conversation's lists."""

    steps: int = MAX_STEPS
    deadline_s: float = float("inf")
    written_bytes: int = 0
    held_bytes: int = 0

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.parts: dict[int, int] = {}
        self.given: set[int] = set()


_budget = _RenderBudget()


def start_budget(seconds: float = MAX_SECONDS) -> None:
    """Give the calling thread a fresh allowance; call before each rendering."""
    _budget.steps = MAX_STEPS
    _budget.deadline_s = time.monotonic() + seconds
    start_writing()


def start_writing() -> None:
    """Forget what was written: the conversation is rendered from its beginning, within the same
    steps and time."""
    _budget.written_bytes = _budget.held_bytes = 0
    _budget.held, _budget.parts, _budget.given = [], {}, set()


def _tick(constant_chars: int = 0) -> str:
    """One step, which writes `constant_chars` of the template's own text."""
    _budget.steps -= 1
    if _budget.steps < 0:
        raise TemplateLimitError(f"the chat template took more than {MAX_STEPS} steps")
    if _budget.steps & 63 == 0 and time.monotonic() > _budget.deadline_s:
        raise TemplateLimitError("the chat template took too long")
    if constant_chars:
        _write(constant_chars)
    return ""


def _write(size_bytes: int) -> None:
    _budget.written_bytes += size_bytes
    if _budget.written_bytes > MAX_WRITTEN_BYTES:
        raise TemplateLimitError(f"the chat template wrote more than {MAX_WRITTEN_BYTES >> 20} MiB")


def _shown(value: Any) -> Any:
    """What `{{ value }}` writes, counted: blocks and macros write too, into texts of their own."""
    if isinstance(value, str):
        _write(sys.getsizeof(value) - 40 if len(value) > 64 else len(value))
        return value
    _write(limits.text_bytes(value))
    return value


def _made(value: Any, parts: int = 0) -> Any:
    """`value`, measured, and remembered: many texts are as much as one that is too large."""
    limits.made(value)
    if isinstance(value, (str, list, tuple, dict)) and id(value) not in _budget.given:
        if not isinstance(value, str):
            _budget.parts[id(value)] = parts = parts or _parts(value)
            _check_parts(parts)
        _budget.held.append(value)
        _budget.held_bytes += sys.getsizeof(value) + _REMEMBERED_BYTES
        if _budget.held_bytes > MAX_HELD_BYTES:
            _let_go()
    return value


def _parts(value: Any) -> int:
    """How many parts a list has, with those of its own parts: lists that hold one another many
    times over take for ever to compare. Those of the conversation count as one, since none of them
    stands twice."""
    total, waiting = 0, [value]
    while waiting:
        container = waiting.pop()
        inner = [*container, *container.values()] if isinstance(container, dict) else container
        total += 1 + len(inner)
        for part in inner:
            if isinstance(part, (list, tuple, dict)) and id(part) not in _budget.given:
                known = _budget.parts.get(id(part))
                if known is None:
                    waiting.append(part)
                else:
                    total += known
        _check_parts(total)
    return total


def _check_parts(parts: int) -> None:
    if parts > MAX_PARTS:
        raise TemplateLimitError(f"the chat template made a list of more than {MAX_PARTS} parts")


def _appended(to: list[Any], value: Any) -> None:
    """`value` is about to stand at the end of a list."""
    _made(value)
    more = _parts([value]) + (
        0 if isinstance(value, (str, int, float, list, tuple, dict, type(None))) else _OBJECT_PARTS
    )
    parts = (_budget.parts.get(id(to)) or _parts(to)) + more
    _budget.parts[id(to)] = parts
    _budget.held.append(to)
    _budget.held_bytes += _REMEMBERED_BYTES
    _check_parts(parts)


def _let_go() -> None:
    """Forget the values that nobody but this list knows; too many that are in use end the
    rendering."""
    held: dict[int, Any] = {id(v): v for v in _budget.held}
    _budget.held, _budget.parts = [], {}
    # Two references are ours while asked: the dictionary's and the call's; the loop's own name is a
    # third.
    kept = [v for v in held.values() if sys.getrefcount(v) > _OWN_REFERENCES]
    _budget.held = kept
    _budget.held_bytes = sum(sys.getsizeof(v) + _REMEMBERED_BYTES for v in kept)
    if _budget.held_bytes > MAX_HELD_BYTES // 2:
        raise TemplateLimitError("the chat template holds too much text at once")


_OWN_REFERENCES = 3


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; for a prompt it
    changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it off the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _meter(tree: nodes.Template) -> None:
    """Rewrite a parsed template: each turn of a loop and each call of a macro ticks, `~` and slices
    are measured.

    `a ~ b` builds a text without a call the sandbox could see, a loop over a list turns without
    one, and a template's own text is written without either.
    """
    defined = itertools.islice(
        tree.find_all((nodes.Macro, nodes.CallBlock, nodes.Block, nodes.For)), MAX_DEFINITIONS + 1
    )
    if len(list(defined)) > MAX_DEFINITIONS:
        raise TemplateLimitError(
            f"the chat template defines more than {MAX_DEFINITIONS} macros, blocks and loops"
        )
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        blocks += tree.find_all(kind)
    for block in blocks:
        chars = sum(len(t.data) for inner in block.body for t in _texts(inner))
        tick = nodes.ExprStmt(
            nodes.Call(nodes.Name("__tick__", "load"), [nodes.Const(chars)], [], None, None)
        )
        block.body.insert(0, tick.set_lineno(block.lineno, override=True))
    # inner ones first: a rewritten node keeps its parts
    for parent in reversed([tree, *tree.find_all(nodes.Node)]):
        for field, value in parent.iter_fields():
            if isinstance(value, list):
                value[:] = [_measured(v) for v in value]
            else:
                setattr(parent, field, _measured(value))


def _texts(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _measured(node: Any) -> Any:
    """`node`, through a filter where it makes a value that nothing else sees: `~`, slices, lists
    and dictionaries."""
    if isinstance(node, nodes.Concat):
        first, *others = node.nodes
        return nodes.Filter(first, "__concat__", others, [], None, None, lineno=node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return nodes.Filter(node, "__slice__", [], [], None, None, lineno=node.lineno)
    if isinstance(node, (nodes.List, nodes.Dict)) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    ):
        return nodes.Filter(node, "__literal__", [], [], None, None, lineno=node.lineno)
    return node


class _GivenList(list[Any]):
    """A list of the conversation: templates read it and can't change it, whatever they may do with
    their own."""


def owned(value: Any) -> Any:
    """A copy of the conversation's containers, so that nothing a template does reaches the
    caller's."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    parts = {k: owned(v) for k, v in value.items()} if isinstance(value, Mapping) else None
    made: Any = _GivenList(owned(v) for v in value) if parts is None else parts
    _budget.given.add(id(made))
    return made


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with its meters."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            autoescape=False,
            finalize=_shown,
        )
        self.globals.pop("lipsum", None)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, __tick__=_tick
        )
        self.filters.update(dict.fromkeys(_UNUSED_FILTERS, _refuse_filter))
        self.filters.update(tojson=_tojson, join=_join)
        self.filters = {name: _guarded(name, f) for name, f in self.filters.items()}
        self.filters.update(__concat__=_concat, __slice__=_made, __literal__=_literal)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _meter(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """A template may add to a list it made itself and take from it; each is a step."""
        if attr in _UNUSED_METHODS:
            return False
        return (attr in ("append", "pop") and type(obj) is list) or super().is_safe_attribute(
            obj, attr, value
        )

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is _tick:
            return _tick(*args)
        _tick()
        name = getattr(__obj, "__name__", "")
        # The sandbox wraps str.format in a function of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if name == "join" and isinstance(owner, str) and args:
            args = (list(args[0]), *args[1:])
            limits.joined_exactly(owner, args[0])
        limits.check_method(owner, name, args, kwargs)
        if name == "append" and isinstance(owner, list) and args:
            _appended(owner, args[0])
        return _made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*`, `**`, `%` and `+` can make a value larger than both sides together."""
        limits.check_operator(operator, left, right)
        _tick()
        known = [_budget.parts.get(id(side)) for side in (left, right)] if operator == "+" else []
        # A list that grows by one at a time is not looked through each time.
        parts = sum(n for n in known if n is not None) if known and None not in known else 0
        return _made(super().call_binop(context, operator, left, right), parts)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are measured; Jinja's pass_* markers are kept by
    `wraps`."""
    given = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        _tick()
        if name in limits.COMPARING and isinstance(args[given], Iterator):
            parts = list(itertools.islice(args[given], limits.MAX_ITEMS + 1))
            args = (*args[:given], parts, *args[given + 1 :])
        limits.check_filter(name, args[given], args[given + 1 :], kwargs)
        return _made(function(*args, **kwargs))

    return measured


def _refuse_filter(*_: Any) -> NoReturn:
    raise TemplateLimitError("the chat template uses a filter that is not offered here")


@jinja2.pass_context  # it is for each time it is made, not for once while the template is read
def _literal(context: Any, value: Any) -> Any:
    return _made(value)


def _concat(*parts: Any) -> str:
    _tick()
    return str(_made(limits.joined("", parts)))


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    """Jinja's `join`, counted while it takes its parts."""
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return limits.joined(d, parts)


def _raise_exception(message: Any = "") -> NoReturn:
    raise TemplateRaisedError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates use
    if len(format) > _LONGEST_TIME_FORMAT:
        raise TemplateLimitError("the chat template writes the time at great length")
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
    if isinstance(value, Iterator):  # what `map` and `select` give
        value = list(value)
    limits.allow(
        limits.text_bytes(value, indent=indent or 0) * (6 if ensure_ascii else 1), "tojson"
    )
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
    if isinstance(value, Iterator):
        return list(value)
    raise TemplateRaisedError(f"the chat template writes a {type(value).__name__} as JSON")


def compile_template(source: str) -> jinja2.Template:
    """Parse `source`; raises jinja2.TemplateError for one that is too large or not a template."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateLimitError(f"the chat template is larger than {MAX_SOURCE_CHARS} characters")
    if _LONG_NUMBER.search(source):
        raise TemplateLimitError("the chat template has a number of more digits than any needs")
    env = TemplateEnvironment()
    start_budget()
    try:
        return env.from_string(source)
    except (RecursionError, MemoryError, SyntaxError) as e:
        raise TemplateLimitError("the chat template is nested too deeply") from e
    except (ArithmeticError, ValueError) as e:
        raise TemplateLimitError("the chat template computes what can't be") from e
