"""A model's chat template: messages in, the exact prompt text out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from localllm.conversation import sandbox
from localllm.errors import RequestError

# ChatML, the most common format, for models that carry no template. Tools are written as text by tools/prompt.py.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class TemplateError(RequestError):
    """The model's chat template can't write this conversation down; the message carries the template's own reason."""

    code = "template_error"
    default_hint = "check the order and roles of the messages"


class ChatTemplate:
    """A compiled template. `render` may be called from any thread.

    A template that refuses the conversation as sent (a system message it does not know, roles that do not alternate)
    gets it once more with system texts folded into the neighbouring user turn and equal roles merged, as editors send
    several system messages and many templates accept one or none.
    """

    def __init__(self, source: str | None, *, bos_text: str = "", eos_text: str = "") -> None:
        self.is_default = not source
        self.source = source or DEFAULT_TEMPLATE
        self.bos_text, self.eos_text = bos_text, eos_text
        try:
            self._template = sandbox.compile_template(self.source)
        except jinja2.TemplateError as e:
            raise TemplateError(f"the model's chat template can't be read: {_reason(e)}") from e

    @property
    def knows_tools(self) -> bool:
        """True when the template itself writes tool definitions into the prompt."""
        return not self.is_default and "tools" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages` (in the form `conversation.messages.normalise` gives). Raises TemplateError."""
        first_error: TemplateError | None = None
        for candidate in _adaptations(messages):
            try:
                return self._render(candidate, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
            except TemplateError as e:
                first_error = first_error or e
        assert first_error is not None
        raise first_error

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        variables: dict[str, Any] = {"bos_token": self.bos_text, "eos_token": self.eos_text, **kwargs}
        variables["messages"] = messages
        sandbox.start_budget()
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables):
                size += len(piece)
                if size > sandbox.MAX_TEXT_CHARS:
                    raise sandbox.TemplateLimitError("the chat template made too much text")
                pieces.append(piece)
        except sandbox.TemplateRaisedError as e:
            raise TemplateError(f"the model's chat template refuses this conversation: {e}", param="messages") from e
        except sandbox.TemplateLimitError as e:
            raise TemplateError(str(e), param="messages") from e
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as e:
            raise TemplateError(
                f"the model's chat template fails on this conversation: {_reason(e)}", param="messages"
            ) from e
        except (RecursionError, MemoryError) as e:
            raise TemplateError("the model's chat template needs too much memory", param="messages") from e
        return "".join(pieces)


def _reason(error: Exception) -> str:
    """The first line of `error`, short: a template's failure can quote the whole conversation."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def _adaptations(messages: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """The conversation as sent, then in forms that stricter templates accept."""
    forms: list[Sequence[Mapping[str, Any]]] = [messages]
    one_system = _merge_equal_roles(_late_systems_to_user(_lead_with_one_system(messages)))
    no_system = _merge_equal_roles(_fold_system_into_user(one_system))
    for form in (one_system, no_system):
        if form not in forms:
            forms.append(form)
    return forms


def _lead_with_one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    leading = list(itertools.takewhile(lambda m: m["role"] == "system", messages))
    if len(leading) < 2:
        return list(messages)
    text = "\n\n".join(str(m.get("content") or "") for m in leading)
    return [{**leading[0], "content": text}, *messages[len(leading) :]]


def _late_systems_to_user(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**m, "role": "user"} if i and m["role"] == "system" else m  # its words stay, in its place
        for i, m in enumerate(messages)
    ]


def _merge_equal_roles(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    merged: list[Mapping[str, Any]] = []
    for m in messages:
        last = merged[-1] if merged else None
        if last is not None and m["role"] == last["role"] and m["role"] in ("user", "assistant"):
            merged[-1] = {**last, **m, "content": f"{last.get('content') or ''}\n\n{m.get('content') or ''}".strip()}
        else:
            merged.append(m)
    return merged


def _fold_system_into_user(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    return [{**messages[0], "role": "user"}, *messages[1:]]
