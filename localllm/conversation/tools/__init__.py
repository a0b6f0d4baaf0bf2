"""Tool-call formats, one file each; a model's format is told from its own template.

A new family is one new file here with a ToolFormat called FORMAT: its signs and markers, its reader and its grammar
(lark.py, calls.py and values.py have the pieces, tagged.py and readers.py those of readers). Nothing else has to learn of
it. Its tests are a writer in tests/conversation/test_tool_formats.py and a reduced template in call_templates.py; the
catalog has a name for it in localllm_catalog/templates.py.
"""

from __future__ import annotations

import importlib
import pkgutil

from localllm.conversation.tools import hermes
from localllm.conversation.tools.base import ToolFormat

DEFAULT = hermes.FORMAT


def found() -> tuple[ToolFormat, ...]:
    """The formats of the files here, in the order of asking: those with a sure sign first."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    formats = [m.FORMAT for m in modules if hasattr(m, "FORMAT")]
    return tuple(sorted(formats, key=lambda f: (f.unsure, f.name)))


FORMATS = found()


def told_from(template: str) -> ToolFormat | None:
    """The format that `template` shows signs of, if any."""
    return next((f for f in FORMATS if any(sign in template for sign in f.signs)), None)


def format_for(template: str) -> ToolFormat:
    """The format that `template` writes; the default where it shows no sign of any."""
    return told_from(template) or DEFAULT


def unread(template: str) -> bool:
    """True where `template` offers tools itself but shows no sign of a format known here."""
    return "tools" in template and told_from(template) is None
