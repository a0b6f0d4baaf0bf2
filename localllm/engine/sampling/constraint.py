"""The constraint of one answer, from its first token to its last.

The answer may be free at first. A grammar becomes active when the model closes its reasoning, or
writes a trigger: the text that opens a tool call. After the call the answer may be free again.
(llama.cpp calls such grammars lazy.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Constraint, Reasoning
from localllm.engine.sampling.grammar import GrammarMatcher
from localllm.engine.sampling.row import Row
from localllm.grammars.trigger import GrammarTrigger

# An answer ends when the same call is made for the fourth time, letter by letter. Small models
# repeat a call until the context is full.
MAX_REPEATED_CALLS = 4


class AnswerConstraint:
    """Follows the tokens of one answer and restricts the next token.

    Pass each chosen token to `accept` before it counts. After that:

        `forced`: tokens that come next regardless of the model. They are taken without `accept`.
        `required_grammar`: a grammar that is needed to continue the answer. Pass its matcher to
            `use`, or call `give_up` if the grammar was refused.
        `control_as_text`: the last token belongs to a marker or a call, so control tokens in it
            are text and stop strings do not count.
        `grammar_changed`: a grammar began or ended with the last token. Earlier drafts are void
            after it.
    """

    def __init__(
        self,
        spec: Constraint,
        spell: Callable[[int], bytes],
        tokens_of: Callable[[str], list[int]],
        eog: Collection[int],
    ) -> None:
        self._spec = spec
        self._spell = spell
        self._tokens_of = tokens_of
        self._eog = eog
        self._text = bytearray()
        self._markers = _Markers(spec)
        self._searched = 0
        self._compiled: dict[tuple[str, str], GrammarMatcher] = {}
        self._matcher: GrammarMatcher | None = None
        self._trigger: GrammarTrigger | None = None
        self._call_start = 0
        self._calls: Counter[bytes] = Counter()
        self._ended = False
        self._call_in_reasoning = False
        self.forced: list[int] = []
        self.grammar_changed = False
        self.control_as_text = False
        self.required_grammar: tuple[str, str] | None = None
        if spec.grammar is not None and not self._awaits_reasoning:
            self.required_grammar = spec.grammar

    # --- the state of the answer ------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True if a grammar restricts the next token."""
        return self._matcher is not None

    @property
    def in_call(self) -> bool:
        """True from a trigger to the end of its grammar."""
        return self._trigger is not None

    @property
    def call_ended_reasoning(self) -> bool:
        """True if a call began within the reasoning, so that the reasoning needs no other end."""
        return self._call_in_reasoning

    @property
    def _awaits_reasoning(self) -> bool:
        return self._spec.grammar is not None and self._markers.thinking

    @property
    def finished(self) -> bool:
        """True if no token may follow."""
        if self.forced:
            return False
        return self._ended or (self._matcher is not None and self._matcher.finished)

    @property
    def stuck(self) -> bool:
        """True if the active grammar's end can't be reached."""
        return self._matcher is not None and self._matcher.stuck

    @property
    def why_stuck(self) -> str:
        """Why the end can't be reached, as text for the client."""
        assert self._matcher is not None
        return self._matcher.why_stuck

    # --- the next token ---------------------------------------------------------------------------

    def allowed(self) -> NDArray[np.uint8] | None:
        """A bit for each token that the active grammar allows next; None without a grammar."""
        if self._matcher is None:
            return None
        return self._matcher.allowed()

    def apply(self, logits: Row) -> None:
        """Set the logits of tokens that the active grammar forbids next to -inf."""
        if self._matcher is not None:
            self._matcher.apply(logits)

    def acceptable(self, tokens: Sequence[int]) -> int:
        """The number of leading `tokens` that the active grammar accepts from here, as far as is
        known.
        """
        if self._matcher is None:
            return len(tokens)
        return self._matcher.acceptable(tokens)

    def forced_tokens(self) -> list[int]:
        """The tokens of the only text that the active grammar allows next."""
        if self._matcher is None:
            return []
        return self._matcher.forced()

    @property
    def can_continue_unconstrained(self) -> bool:
        """True if the model's end here would end only the call, so that it would choose again
        freely.
        """
        trigger = self._trigger
        if trigger is None or self._matcher is None or trigger.closing or not trigger.again:
            return False
        return self._matcher.accepting

    # --- taking tokens ----------------------------------------------------------------------------

    def accept(self, token: int) -> int | None:
        """Take the chosen token, and return the token that counts, which may be another one.

        Returns None if a call ended and no token counts. The model must then choose again.
        """
        self.grammar_changed = False
        self.control_as_text = self.in_call
        if self._matcher is None:
            return self._accept_free(token)
        if self.in_call and token in self._eog:
            return self._end_of_call(token)
        self._matcher.accept(token)
        self._text += self._spell(token)
        if self.in_call and self._matcher.finished and not self._matcher.stuck:
            self._close()
        return token

    def use(self, grammar: tuple[str, str], matcher: GrammarMatcher) -> None:
        """Take the matcher of a compiled `grammar`."""
        self._compiled[grammar] = matcher
        self._activate()

    def give_up(self) -> None:
        """The grammar of a call was refused: the model writes calls without one from now on."""
        self.required_grammar = None
        self._trigger = None
        self._markers.forget_triggers()

    def _accept_free(self, token: int) -> int:
        if token in self._eog:
            if self._awaits_reasoning:
                return self._end_of_reasoning()
            return token
        new = len(self._text)
        self._text += self._spell(token)
        while True:
            marker = self._markers.next(self._text, self._searched, new)
            if marker is None:
                return token
            start, end = marker
            self._searched = end
            was_thinking = self._markers.thinking
            trigger = self._markers.take_marker(self._text, start, end)
            if trigger is not None and trigger.once and self._calls:
                self._ended = True
                return token
            if trigger is not None:
                self._call_in_reasoning |= was_thinking
                self._trigger = trigger
                self._call_start = start
                return self._begin(token, end, trigger.grammar, trigger.lead)
            if self._spec.grammar is not None and not self._markers.thinking:
                return self._begin(token, end, self._spec.grammar, self._spec.lead)

    def _begin(self, token: int, end: int, grammar: tuple[str, str], lead: str) -> int:
        """Begin a `grammar` after its `lead`, which follows the marker that ends at `end`.

        Text of the last token after the marker is dropped, unless it begins the lead. Returns the
        token that counts instead of `token`.
        """
        after_marker = bytes(self._text[end:])
        rest_of_lead = _without_beginning(lead, after_marker)
        if rest_of_lead is not None:
            self._force(rest_of_lead)
        else:
            before_marker = self._spell(token).removesuffix(after_marker)
            del self._text[end - len(before_marker) :]
            self._force(before_marker.decode("utf-8", "replace") + lead)
            token = self.forced.pop(0)
        self._require(grammar)
        return token

    def _end_of_reasoning(self) -> int:
        """Close the reasoning, because the model ended the answer within it. Returns the token
        that counts.
        """
        reasoning = self._spec.reasoning
        assert reasoning is not None
        assert self._spec.grammar is not None
        self._markers.thinking = False
        self._force(reasoning.closing + self._spec.lead)
        self._require(self._spec.grammar)
        return self.forced.pop(0)

    def _end_of_call(self, token: int) -> int | None:
        """End a call, because the model ended the answer within it, which its grammar allows."""
        self._close()
        if self.forced:
            return self.forced.pop(0)
        if self._ended:
            return token
        return None

    def _close(self) -> None:
        """Finish the call, whose grammar has ended."""
        trigger = self._trigger
        assert trigger is not None
        call = bytes(self._text[self._call_start :])
        self._calls[call] += 1
        self._ended = not trigger.again or self._calls[call] >= MAX_REPEATED_CALLS
        self._trigger = None
        self._matcher = None
        self.grammar_changed = True
        self._force(trigger.closing)
        self._searched = len(self._text)

    def _force(self, text: str) -> None:
        """Force `text` as the next tokens, regardless of the model."""
        self._text += text.encode()
        if text:
            self.forced = self._tokens_of(text)

    def _require(self, grammar: tuple[str, str]) -> None:
        self.grammar_changed = True
        self.control_as_text = True
        self.required_grammar = grammar
        self._activate()

    def _activate(self) -> None:
        matcher = (
            self._compiled.get(self.required_grammar) if self.required_grammar is not None else None
        )
        if matcher is not None:
            self._matcher = matcher.copy()
            self.required_grammar = None


class _Markers:
    """Finds the markers of reasoning and of calls in an answer's text.

    `thinking`: the text is within the reasoning.
    """

    def __init__(self, spec: Constraint) -> None:
        self._triggers = {text.encode(): trigger for text, trigger in spec.triggers.items()}
        self._reasoning = spec.reasoning
        self.thinking = spec.reasoning is not None and spec.reasoning.opened
        self._has_thought = self.thinking
        self._reasoning_at = 0
        self._compile()

    def _compile(self) -> None:
        """Compile the patterns to search for before, in and after the reasoning."""
        triggers = [*self._triggers]
        reasoning = self._reasoning or Reasoning("", "")
        in_reasoning = triggers if reasoning.may_call else []
        self._before_reasoning = _Pattern([*triggers, reasoning.opening.encode()])
        self._in_reasoning = _Pattern([*in_reasoning, reasoning.closing.encode()])
        self._after_reasoning = _Pattern(triggers)

    def forget_triggers(self) -> None:
        """Ignore all triggers from now on."""
        self._triggers = {}
        self._compile()

    def next(self, text: bytearray, searched: int, new: int) -> tuple[int, int] | None:
        """The range of the next marker; None if there is no marker.

        Markers before `searched` are done. The text from `new` on was not searched yet.
        """
        if self.thinking:
            return self._in_reasoning.search(text, searched, new)
        if self._has_thought:
            return self._after_reasoning.search(text, searched, new)
        return self._before_reasoning.search(text, searched, new)

    def take_marker(self, text: bytearray, start: int, end: int) -> GrammarTrigger | None:
        """Take the marker at [start, end). Returns its trigger if it is a valid one."""
        marker = bytes(text[start:end])
        reasoning = self._reasoning
        trigger = self._triggers.get(marker)
        if trigger is not None:
            if self.thinking and text[self._reasoning_at : start].strip():
                return None
            before = text[:start].decode("utf-8", "replace")
            if trigger.preceded_by and not re.search(rf"(?:{trigger.preceded_by})\Z", before):
                return None
            self.thinking = False
            return trigger
        assert reasoning is not None
        if not self.thinking and text[:start].strip():
            return None  # the answer mentions the marker
        self.thinking = not self.thinking
        self._has_thought = True
        self._reasoning_at = end
        return None


class _Pattern:
    """Finds the first of several texts. If two begin at the same place, it finds the longer one."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._pattern = re.compile(b"|".join(re.escape(text) for text in longest_first))

    def search(self, text: bytearray, searched: int, new: int) -> tuple[int, int] | None:
        """The range of the first text that begins at or after `searched` and ends after `new`."""
        if not self._longest:
            return None
        found = self._pattern.search(text, max(searched, new - self._longest + 1))
        return None if found is None else found.span()


def _without_beginning(text: str, prefix: bytes) -> str | None:
    """The rest of `text` after `prefix`; None if `text` does not begin with `prefix`."""
    if not text.encode().startswith(prefix):
        return None
    return text.encode().removeprefix(prefix).decode("utf-8", "replace")
