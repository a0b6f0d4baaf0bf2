"""The catalog has a name for every notation of calls that is read, and tells them apart as the server does."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversation.call_templates import TEMPLATES
from conversation.test_published_templates import _FILES
from localllm.conversation.tools import FORMATS, detect_format
from localllm_catalog.templates import tool_format

NAMES = {name.partition(",")[0]: tool_format(template) for name, template in TEMPLATES.items()}


def test_every_notation_has_a_name_of_its_own() -> None:
    assert set(NAMES) == {f.name for f in FORMATS}
    assert None not in NAMES.values()
    assert len(set(NAMES.values())) == len(NAMES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_spellings_of_one_notation_have_one_name(name: str) -> None:
    assert tool_format(TEMPLATES[name]) == NAMES[name.partition(",")[0]]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_published_templates_are_told_apart_as_the_server_does(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    style = detect_format(source)
    assert tool_format(source) == (NAMES[style.name] if style is not None else None)
