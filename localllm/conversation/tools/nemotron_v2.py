"""Nemotron Nano v2: Phi's array of calls between text tags, `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`."""

from __future__ import annotations

from localllm.conversation.tools.phi import Phi


class NemotronV2(Phi):
    """All calls in one JSON array."""

    name = "nemotron_v2"
    signs = ("<TOOLCALL>",)
    unsure = 0
    markers = ("<TOOLCALL>",)
    control = False
    opening = None
    closing = "</TOOLCALL>"


FORMAT = NemotronV2()
