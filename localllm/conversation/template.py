"""A model's chat template: messages in, the exact prompt text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from localllm.conversation import sandbox
from localllm.conversation.message_variants import variants
from localllm.conversation.sandbox_limits import TemplateLimitError
from localllm.errors import RequestError

# ChatML, the most common format, for models that carry no template. Tools are written as text by
# tools/prompt.py.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# A model that carries no template was not trained on its marks: to it they are text, and it goes on
# with the next turn.
DEFAULT_MARKS = ("<|im_end|>", "<|im_start|>")

# Behind an unfinished answer: where it stands in the rendered text, the prompt ends. Two characters
# for private use.
_CUT = "\ue5c7\uf2a9"


class TemplateError(RequestError):
    """The model's chat template can't write this conversation down; the message carries the
    template's own reason."""

    code = "template_error"
    default_hint = "check the order and roles of the messages"


class ChatTemplate:
    """A compiled template. `render` may be called from any thread.

    A template that refuses the conversation as sent gets it in the variants that templates are
    known to want (see message_variants.py); when it refuses them all, the error is that of the
    conversation as sent.
    """

    def __init__(self, source: str | None, *, bos_text: str = "", eos_text: str = "") -> None:
        self.is_default = not source
        self.source = source or DEFAULT_TEMPLATE
        self.bos_text, self.eos_text = bos_text, eos_text
        # OpenAI's open models read a turn's reasoning as `thinking`; everybody else's as
        # `reasoning_content`.
        self._reads_thinking = "thinking" in self.source and "reasoning_content" not in self.source
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
        """The prompt for `messages` (in the form `conversation.messages.normalise` gives). Raises
        TemplateError."""
        if self._reads_thinking:
            messages = [
                {**m, "thinking": m["reasoning_content"]} if m.get("reasoning_content") else m
                for m in messages
            ]
        first_error: TemplateError | None = None
        sandbox.start_budget()  # one for all variants
        for variant, variables in variants(messages, tools):
            try:
                return self._render(
                    variant, {**variables, **kwargs, "add_generation_prompt": add_generation_prompt}
                )
            except TemplateLimitError as e:
                raise TemplateError(str(e), param="messages") from e
            except TemplateError as e:
                first_error = first_error or e
        assert first_error is not None
        raise first_error

    def render_continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt that lets the model go on with the last message, an assistant's text: it ends
        where that text ends, its turn still open. Raises TemplateError."""
        *before, last = messages
        text: str = last["content"]
        try:
            marked = [*before, {**last, "content": text + _CUT}]
            whole = self.render(marked, tools=tools, add_generation_prompt=False, **kwargs)
        except TemplateError:
            whole = ""
        head, cut, _ = whole.rpartition(_CUT)
        if cut and head.endswith(text):
            return head
        # The template takes no answer at the end, or changes it: the text follows where an answer
        # would begin.
        return self.render(before, tools=tools, **kwargs) + text

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        sandbox.start_writing()
        try:
            # A copy of its own: a template may add to the lists it is given.
            given = sandbox.owned({**variables, "messages": messages})
            pieces += self._template.generate(
                **{"bos_token": self.bos_text, "eos_token": self.eos_text, **given}
            )
        except sandbox.TemplateRaisedError as e:
            raise TemplateError(
                f"the model's chat template refuses this conversation: {e}", param="messages"
            ) from e
        except TemplateLimitError:
            raise
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as e:
            raise TemplateError(
                f"the model's chat template fails on this conversation: {_reason(e)}",
                param="messages",
            ) from e
        except (RecursionError, MemoryError) as e:
            raise TemplateError(
                "the model's chat template needs too much memory", param="messages"
            ) from e
        return "".join(pieces)


def _reason(error: Exception) -> str:
    """The first line of `error`, short: a template's failure can quote the whole conversation."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]
