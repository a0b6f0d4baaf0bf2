"""Renders chat templates in a separate process with time and memory limits.

localllm/limited_child.py runs this module. A chat template comes from a downloaded file and is a
program. Jinja's immutable sandbox denies it Python's internals (the class of CVE-2024-34359) and
changes to the conversation. The process limits the time and memory that it can use.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.conversation.message_variants import variants
from localllm.conversation.template import MAX_CHARS, TOO_LONG
from localllm.limited_child import serve

_REASON_CHARS = 200
_MAX_COMPILED = 32


class FailedRenderingError(jinja2.TemplateError):
    """There is no prompt. The message is a complete sentence."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text.

    It has no effect on a prompt.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it off the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _ReadOnlyList(list[Any]):
    """A list of the conversation, which templates can read but not change.

    Templates may change the lists that they created.
    """


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, configured like Hugging Face's `apply_chat_template`."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            autoescape=False,
        )
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters.update(tojson=_tojson)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow a template to append to and pop from a list that it created."""
        if attr in ("append", "pop") and type(obj) is list:
            return True
        return super().is_safe_attribute(obj, attr, value)


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt that the template `source` makes of the conversation.

    It uses the first variant that the template accepts (message_variants.py). It sets no limits, so
    call it only in the sandbox process. Raises FailedRenderingError with the error for the
    conversation as sent.
    """
    template = _compiled(source)
    first_error: FailedRenderingError | None = None
    for variant, variant_variables in variants(messages, tools):
        try:
            return _render_template(
                template, {**variant_variables, **variables, "messages": variant}
            )
        except FailedRenderingError as e:
            first_error = first_error or e
    assert first_error is not None
    raise first_error


@functools.lru_cache(maxsize=_MAX_COMPILED)
def _compiled(source: str) -> jinja2.Template:
    try:
        return TemplateEnvironment().from_string(source)
    except MemoryError:
        raise
    except RecursionError as e:
        raise FailedRenderingError("the model's chat template is nested too deeply") from e
    except Exception as e:
        raise FailedRenderingError(f"the model's chat template can't be read: {_reason(e)}") from e


def _render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    n_chars = 0
    try:
        # Variants share parts, so a template must not change them.
        for piece in template.generate(_read_only(variables)):
            n_chars += len(piece)
            if n_chars > MAX_CHARS:
                raise FailedRenderingError(TOO_LONG)
            pieces.append(piece)
    except (MemoryError, FailedRenderingError):
        raise
    except Exception as e:
        raise FailedRenderingError(
            f"the model's chat template failed on this conversation: {_reason(e)}"
        ) from e
    return "".join(pieces)


def _read_only(value: Any) -> Any:
    """A copy of `value` with lists that templates can't change."""
    if isinstance(value, Mapping):
        return {key: _read_only(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return _ReadOnlyList(_read_only(member) for member in value)
    return value


def _reason(error: Exception | str) -> str:
    """The shortened first line of `error`: a template's error can quote the complete
    conversation."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:_REASON_CHARS]


def _raise_exception(message: Any = "") -> NoReturn:
    reason = _reason(str(message) or "without a reason")
    raise FailedRenderingError(f"the model's chat template rejects this conversation: {reason}")


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
    if isinstance(value, Iterator):  # the result of `map` and `select`
        value = list(value)
    pair: Any = tuple(separators) if separators else None
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=pair,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return None
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"it can't convert a {type(value).__name__} to JSON")


def _answer(question: Mapping[str, Any]) -> str:
    return render(**question)


def _answerer(setup: object) -> Callable[[Mapping[str, Any]], str]:
    return _answer


if __name__ == "__main__":
    serve(_answerer)
