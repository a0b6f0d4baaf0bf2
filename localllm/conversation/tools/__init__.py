"""The registry of tool-call formats. A model's format is detected from its chat template.

To add a family, add one file to formats/ with its ToolFormat in FORMATS: signs, markers, reader
and grammar. The building blocks of grammars are in lark.py, call_grammars.py and values.py, those
of readers in readers.py and tag_reader.py. No other code needs to change. Its tests need a writer
in tests/support/tool_writers.py and a reduced template in tests/conversation/call_templates.py.
"""

from __future__ import annotations

import importlib
import pkgutil

from localllm.conversation.tools import formats
from localllm.conversation.tools.base import ToolFormat
from localllm.conversation.tools.formats import hermes

DEFAULT: ToolFormat = hermes.FORMATS[0]


def discover() -> tuple[ToolFormat, ...]:
    """All formats, in the order in which templates are tested: unambiguous signs first."""
    modules = [
        importlib.import_module(f"{formats.__name__}.{m.name}")
        for m in pkgutil.iter_modules(formats.__path__)
    ]
    return tuple(sorted((f for m in modules for f in m.FORMATS), key=_test_order))


def _test_order(style: ToolFormat) -> tuple[int, str]:
    return style.ambiguity, style.name


FORMATS = discover()


def detect_format(template: str) -> ToolFormat | None:
    return next(
        (
            tool_format
            for tool_format in FORMATS
            if any(sign in template for sign in tool_format.signs)
        ),
        None,
    )


def format_for(template: str) -> ToolFormat:
    """The format that `template` writes, or the default if it has no known sign."""
    return detect_format(template) or DEFAULT


def has_unknown_format(template: str) -> bool:
    """True if `template` handles tools itself but has no sign of a known format."""
    return "tools" in template and detect_format(template) is None


def reasoning_markers(template: str, style: ToolFormat | None = None) -> tuple[str, str] | None:
    """The opening and closing markers of the reasoning, or None.

    They are those of the tool-call format `style` (default: the template's own), else the first
    pair that the template mentions.
    """
    style = style or detect_format(template)
    if style is not None and style.think is not None:
        return style.think
    # Tags without a family are tested before and after the tags of families.
    pairs = (
        ("<think>", "</think>"),
        *(tool_format.may_think for tool_format in FORMATS if tool_format.may_think is not None),
        ("<thinking>", "</thinking>"),
    )
    return next((pair for pair in pairs if pair[1] in template), None)
