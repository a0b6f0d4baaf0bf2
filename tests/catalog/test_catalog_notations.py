"""A model supports tools if the server can parse its calls, although the catalog contains no format
of calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversation.call_templates import TEMPLATES
from conversation.test_published_templates import _FILES
from localllm.conversation.tools import FORMATS, detect_format, reasoning_markers
from localllm_catalog import stated


def test_every_notation_has_a_template() -> None:
    assert {name.partition(",")[0] for name in TEMPLATES} == {f.name for f in FORMATS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_of_each_notation_calls_tools(name: str) -> None:
    assert stated.calls_tools(TEMPLATES[name])


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_published_templates_are_distinguished_as_in_the_server(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert detect_format(source) is None or stated.calls_tools(source)
    common = (reasoning_markers(source) or ("", ""))[0].lower()
    assert "think>" not in common or stated.reasoning_kind(source) != "none"
