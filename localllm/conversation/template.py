"""A model's chat template: converts messages to the exact prompt text."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from localllm.errors import BusyError, RequestError
from localllm.limited_child import (
    ChildError,
    ChildLimits,
    LimitedChild,
    OverLimitError,
    RefusedError,
)

# ChatML, the most common format, for models without a template. tools/prompt.py writes tools as
# text.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# A model without a template was not trained on these marks. It treats them as text and would
# continue with the next turn.
DEFAULT_MARKS = ("<|im_end|>", "<|im_start|>")

# Appended to an unfinished answer. The prompt ends at its position in the rendered text. Two
# private-use characters.
_CUT_MARK = "\ue5c7\uf2a9"

# More than any context holds, and few enough characters that reading them delays no other request.
MAX_CHARS = 2**23
TOO_LONG = (
    f"this conversation has more than {MAX_CHARS:,} characters, "
    "which exceeds every context: shorten it"
)
_MAX_SOURCE_CHARS = 2**20
_PROGRAM = "localllm.conversation.sandbox"
# Keys of a message that no template reads.
_ATTACHMENT_FIELDS = ("images", "sounds", "pdfs")
# CPU time: 20,000 tokens take about 0.01 s (three published templates), so a million fit. Templates
# need little address space beyond their memory.
_FIRST_LIMITS = ChildLimits(cpu_s=0.5, memory_bytes=64 * 2**20, spare_bytes=32 * 2**20)
_LAST_LIMITS = ChildLimits(cpu_s=1.4, memory_bytes=128 * 2**20, spare_bytes=32 * 2**20)
# Includes the start of a process.
_SLOW_S = 1.0
# The process shared by all templates. A slow rendering is repeated in a separate process.
_SHARED = LimitedChild(_PROGRAM, _FIRST_LIMITS)


def warm_up() -> None:
    """Start the template process, so that the first conversation does not wait for it."""
    with suppress(ChildError):
        _SHARED.ask({"source": "", "messages": [], "tools": None, "variables": {}})


class TemplateError(
    RequestError, code="template_error", default_hint="check the order and roles of the messages"
):
    """The model's chat template can't render this conversation.

    The message contains the template's own reason.
    """


def check_length(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise TemplateError if the texts of `messages` are too long for every context. This takes no
    time, however long they are."""
    if _n_chars(messages) > MAX_CHARS:
        raise TemplateError(TOO_LONG, param="messages")


def _n_chars(value: Any) -> int:
    """The number of characters of all texts in `value`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum(map(_n_chars, value))


class ChatTemplate:
    """A model's template.

    `render` may be called from any thread. It blocks until the template process answers
    (sandbox.py). A template that rejects the conversation as sent gets the variants that templates
    are known to need (message_variants.py). If it rejects all of them, the error is that of the
    conversation as sent.
    """

    def __init__(self, source: str | None, *, bos_text: str = "", eos_text: str = "") -> None:
        self.is_default = not source
        self.source = source or DEFAULT_TEMPLATE
        self.bos_text = bos_text
        self.eos_text = eos_text
        # OpenAI's open models read a turn's reasoning as `thinking`, all others as
        # `reasoning_content`.
        self._reads_thinking = "thinking" in self.source and "reasoning_content" not in self.source
        # A conversation at least this long is treated as slow. It is half the length of the last
        # slow one.
        self._slow_chars = math.inf
        self._slow_turn = threading.Lock()
        if len(self.source) > _MAX_SOURCE_CHARS:
            raise TemplateError(
                f"the model's chat template is larger than {_MAX_SOURCE_CHARS} characters"
            )

    @property
    def knows_tools(self) -> bool:
        """True if the template itself writes tool definitions into the prompt."""
        return not self.is_default and "tools" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages` (in the form of `conversation.messages.normalise`).

        Raises TemplateError, or BusyError if a slow template is already running.
        """
        special_tokens = {"bos_token": self.bos_text, "eos_token": self.eos_text}
        question = {
            "source": self.source,
            "messages": [self._template_message(message) for message in messages],
            "tools": tools,
            "variables": {
                **special_tokens,
                **kwargs,
                "add_generation_prompt": add_generation_prompt,
            },
        }
        try:
            return str(self._answer(question))
        except OverLimitError as e:
            raise TemplateError(
                f"the model's chat template can't render this conversation: {e}",
                hint="shorten the conversation, or use another model",
                param="messages",
            ) from e
        except RefusedError as e:
            raise TemplateError(str(e), param="messages") from e
        except ChildError as e:
            raise BusyError(f"the model's chat template could not be run: {e}") from e

    def render_continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt with which the model continues the last message, an assistant's text.

        It ends with that text, and the turn stays open. Raises TemplateError and BusyError.
        """
        *earlier, last_message = messages
        text: str = last_message["content"]
        try:
            marked = [*earlier, {**last_message, "content": text + _CUT_MARK}]
            rendered = self.render(marked, tools=tools, add_generation_prompt=False, **kwargs)
        except TemplateError:
            rendered = ""
        head, cut, _ = rendered.rpartition(_CUT_MARK)
        if cut and head.endswith(text):
            return head
        # The template rejects an answer at the end, or changes it. The text is then appended where
        # an answer would begin.
        return self.render(earlier, tools=tools, **kwargs) + text

    def _template_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a message that the template sees."""
        shown = {key: value for key, value in message.items() if key not in _ATTACHMENT_FIELDS}
        if self._reads_thinking and shown.get("reasoning_content"):
            shown["thinking"] = shown["reasoning_content"]
        return shown

    def _answer(self, question: Mapping[str, Any]) -> Any:
        """The child's answer.

        The process shared by all templates is used first. If it takes too long, a separate process
        renders this conversation. Later conversations of at least half its length use a separate
        process too, until the template is quick again. Only one slow conversation runs at a time.
        """
        n_chars = _n_chars(question["messages"])

        def is_quick() -> bool:
            return n_chars < self._slow_chars

        try:
            if is_quick():
                return _SHARED.ask(question, wanted=is_quick)
        except RefusedError:
            raise
        except ChildError:
            self._slow_chars = min(n_chars / 2, self._slow_chars)
        if not self._slow_turn.acquire(blocking=False):
            raise BusyError(
                "the model's slow chat template is rendering another conversation",
                retry_after_s=2.0,
            )
        started_s = time.monotonic()
        separate_process = LimitedChild(_PROGRAM, _LAST_LIMITS)
        try:
            return separate_process.ask(question)
        finally:
            separate_process.close()
            if time.monotonic() - started_s <= _SLOW_S:
                self._slow_chars = math.inf
            self._slow_turn.release()
