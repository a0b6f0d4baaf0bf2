"""Apriel: Phi's array of calls between text tags, `<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`."""

from __future__ import annotations

from localllm.conversation.tools.phi import Phi


class Apriel(Phi):
    """All calls in one JSON array."""

    name = "apriel"
    signs = ("</tool_calls>",)
    unsure = 1
    markers = ("<tool_calls>",)
    control = False
    opening = None
    closing = "</tool_calls>"


FORMAT = Apriel()
