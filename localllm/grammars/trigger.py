"""The condition under which a reply's own text starts a grammar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarTrigger:
    """A grammar for the text after a marker that the model writes itself.

    - `lead`: text that the engine appends after the marker.
    - `grammar`: (kind, source) of the text that follows.
    - `closing`: text that the engine appends after that.
    - `again`: the reply then continues, and another call may follow. Otherwise it ends.
    - `once`: the marker opens only the first call of a reply. If it comes again, the reply ends,
      because the text after it would not be read as a call.
    - `preceded_by`: a regular expression. The marker counts only if the text before it ends with a
      match.
    """

    lead: str
    grammar: tuple[str, str]
    closing: str = ""
    again: bool = False
    once: bool = False
    preceded_by: str = ""
