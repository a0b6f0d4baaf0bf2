"""The value that says where an answer's own text turns a grammar on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarTrigger:
    """A grammar for the text behind a marker that the model writes itself: `lead` is put there, then
    comes a text of the `grammar` (kind, source), then `closing` is put there. `again`: the answer
    then goes on, and another call may follow; otherwise it ends.

    `once`: the marker opens the first call of an answer only. If it comes again, the answer ends:
    nothing behind it would be read as a call.
    `preceded_by`: a regular expression; the marker counts only if the answer before it ends with a
    match."""

    lead: str
    grammar: tuple[str, str]
    closing: str = ""
    again: bool = False
    once: bool = False
    preceded_by: str = ""
