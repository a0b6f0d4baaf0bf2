"""Size checks of a chat template's operations, made before they run: refuses what no prompt could
need.

Sizes are bytes as Python stores them, so that text of wide characters counts as what it takes.
Integers are checked only where they multiply something (a repetition, a width, an indentation);
elsewhere a number is just a number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import jinja2

MAX_TEXT_BYTES = 1 << 24
MAX_ITEMS = 250_000
MAX_INTEGER_BITS = 256
_MAX_NODES = 250_000
# Filters that compare the parts of a list.
COMPARING = ("sort", "unique", "groupby", "dictsort", "min", "max")
_NUMBER = re.compile(r"\d+")
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?[A-Za-z%]")
_FIELD = re.compile(r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")

Check: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or would make too much text."""


def allow(size_bytes: int, what: str) -> None:
    """Raises TemplateLimitError where `what` would make more than any prompt could be."""
    if size_bytes > MAX_TEXT_BYTES:
        raise TemplateLimitError(
            f"the chat template's {what} would make more than {MAX_TEXT_BYTES >> 20} MiB of text"
        )


def made(value: Any) -> Any:
    if isinstance(value, str):
        allow(sys.getsizeof(value), "text")
    elif isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
        raise TemplateLimitError(f"the chat template made a list of more than {MAX_ITEMS} items")
    return value


def shown(value: Any) -> Any:
    """`value`, unless writing it as text would make too much: lists may hold one another many times
    over."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    allow(text_bytes(value), "output")
    return value


def text_bytes(value: Any, *, indent: int = 0) -> int:
    """What `value` takes at most as text (`repr` or JSON); raises TemplateLimitError where that is
    too long to say."""
    total, nodes = 0, 0
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        nodes += 1
        total += 4 + indent * depth
        if isinstance(item, str):
            # A control character becomes six in JSON; a text that has many of them is rare, and
            # small.
            total += (
                sys.getsizeof(item)
                if len(item) < 4096 or item.isprintable()
                else 2 * sys.getsizeof(item)
            )
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, Mapping):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += [(part, depth + 1) for part in item]
        if nodes > _MAX_NODES or len(waiting) > 4 * _MAX_NODES:
            raise TemplateLimitError("the chat template writes a value of too many parts")
        allow(total, "output")
    return total


def check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for a, b in ((left, right), (right, left)):
            if isinstance(b, int) and b > 0:
                _check_repeat(a, b)
    elif operator == "**" and not (_bits(left) * abs(right) <= MAX_INTEGER_BITS):
        raise TemplateLimitError("the chat template computes a very large power")
    elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
        if isinstance(left, (list, tuple)):
            _allow_items(len(left) + len(right))
        else:
            allow((len(left) + len(right)) * max(_char_bytes(left), _char_bytes(right)), "text")
    elif operator == "%" and isinstance(left, str):
        _check_percent(left, right)


def _check_repeat(value: Any, times: int) -> None:
    if isinstance(value, str):
        allow(len(value) * times * _char_bytes(value), "repetition")
    elif isinstance(value, (list, tuple)):
        _allow_items(len(value) * times)
    elif isinstance(value, int) and _bits(value) + _bits(times) > MAX_INTEGER_BITS:
        raise TemplateLimitError("the chat template computes a very large number")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _allow_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateLimitError(
            f"the chat template would make a list of more than {MAX_ITEMS} items"
        )


def _char_bytes(text: Any) -> int:
    """Bytes that each character of `text` takes."""
    if not isinstance(text, str) or text.isascii():
        return 1
    return max(1, sys.getsizeof(text) // max(1, len(text)))


def _width(digits: str) -> int:
    """A width or precision, or the most that any text may have: zeros in front don't make it
    smaller."""
    return min(int(digits.lstrip("0")[:12] or 0), MAX_TEXT_BYTES)


def _check_percent(form: str, right: Any) -> None:
    values = [right]
    if isinstance(right, Mapping):
        values = list(right.values())
    elif isinstance(right, tuple):
        values = list(right)
    conversions = list(_CONVERSION.finditer(form))
    largest = max((text_bytes(v) for v in values), default=0)
    sizes = [size for size in chain.from_iterable(c.groups() for c in conversions) if size]
    widths = sum(_width(size) for size in sizes if size != "*")
    if "*" in sizes:
        widths += sum(abs(v) for v in values if isinstance(v, int))
    allow(4 * widths + len(form) * _char_bytes(form) + largest * len(conversions), "format")


def _check_format(form: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not isinstance(form, str):
        return
    fields = _FIELD.findall(form)
    values = [*args, *kwargs.values()]
    largest = max((text_bytes(v) for v in values), default=0)
    sizes = chain.from_iterable(_NUMBER.findall(field.partition(":")[2]) for field in fields)
    widths = sum(_width(size) for size in sizes)
    if any("{" in f for f in fields):  # a width that is itself an argument
        widths += sum(abs(v) for v in values if isinstance(v, int))
    allow(4 * widths + len(form) * _char_bytes(form) + largest * len(fields), "format")


def _check_width(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            allow(4 * value, "padding")


def _check_indent(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    width = kwargs.get("width", args[0] if args else 4)
    each = 4 * len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    plain = str(text)
    allow(sys.getsizeof(plain) + (plain.count("\n") + 1) * each * _char_bytes(plain), "indent")


def _check_replace(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(args) < 2 or not all(isinstance(a, str) for a in args[:2]):
        return
    plain = str(text)
    old, new = args[0], args[1]
    count = plain.count(old)
    each = max(_char_bytes(plain), _char_bytes(new))
    allow((len(plain) + count * max(0, len(new) - len(old))) * each, "replace")


def _check_split(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    by = kwargs.get("sep", args[0] if args else None)
    if len(text) <= MAX_ITEMS:
        return
    if by:
        _allow_items(text.count(by) if isinstance(by, str) else 0)  # else it fails by itself
    else:
        _allow_items(sum(text.count(space) for space in " \n\t\r"))


def _check_lines(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(text) > MAX_ITEMS:
        _allow_items(text.count("\n") + 1)


def _check_characters(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A filter that takes a text apart."""
    if isinstance(value, (str, list, tuple)):
        _allow_items(len(value))


def _check_written_characters(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A filter that takes a text apart, whatever it is given."""
    if not isinstance(value, (int, float)):
        _allow_items(len(value) if isinstance(value, str) else text_bytes(value))


def _check_case(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A change of letters: Python makes three of four bytes each of every one, unless all are
    ASCII."""
    if isinstance(value, str) and not value.isascii():
        allow(12 * len(value), "change of letters")


def _check_compared(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A filter that compares the parts: it makes a text of lower case, or a key, of each."""
    if isinstance(value, (list, tuple, Mapping)):
        allow(text_bytes(value), "comparison")


def _check_sum(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(value, (list, tuple)):
        _allow_items(sum(len(v) for v in value if isinstance(v, (list, tuple))))


def _check_text(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    shown(value)


def _check_percent_filter(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _check_percent(str(value), dict(kwargs) if kwargs else args)


_METHODS: Mapping[str, Check] = {
    "ljust": _check_width, "rjust": _check_width, "center": _check_width, "replace": _check_replace,
    "format": _check_format,
    "split": _check_split, "rsplit": _check_split, "splitlines": _check_lines,
    **dict.fromkeys(("upper", "lower", "title", "capitalize", "casefold", "swapcase"), _check_case),
}  # fmt: skip
_FILTERS: Mapping[str, Check] = {
    "center": _check_width, "indent": _check_indent, "replace": _check_replace,
    "format": _check_percent_filter,
    "list": _check_characters, "sum": _check_sum, **dict.fromkeys(COMPARING, _check_compared),
    **dict.fromkeys(("upper", "lower", "capitalize"), _check_case),
    **dict.fromkeys(
        ("title", "wordcount", "striptags", "urlencode", "escape", "e", "forceescape"),
        _check_written_characters
    ),
    "string": _check_text,
}  # fmt: skip


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(owner, str) and name in _METHODS:
        _METHODS[name](owner, args, kwargs)


def check_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name in _FILTERS:
        _FILTERS[name](value, args, kwargs)


def joined(separator: Any, parts: Iterable[Any]) -> str:
    """`parts` as one text, counted while they are taken."""
    texts: list[str] = []
    size = 0
    widest = 1
    glue = str(separator)
    for part in parts:
        text = part if isinstance(part, str) else str(shown(part))
        widest = max(widest, _char_bytes(text), _char_bytes(glue))
        size += len(text) + len(glue) + 8
        allow(size * widest, "join")
        _allow_items(len(texts))
        texts.append(text)
    return glue.join(texts)


def joined_exactly(separator: str, parts: Sequence[Any]) -> None:
    size = sum(len(p) + len(separator) for p in parts if isinstance(p, str))
    widest = max((_char_bytes(p) for p in (separator, *parts)), default=1)
    allow(size * widest, "join")
