"""Every effort level that clients send is accepted.

The template receives a level that it knows.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

THREE = (
    "{% for m in messages %}{{ m.content }}{% endfor %} effort={{ reasoning_effort or 'medium' }}"
)
MORE = THREE + (
    "{% if reasoning_effort == 'max' %} at most{% elif reasoning_effort == \"none\" %} "
    "not "
    "at "
    "all{% endif %}"
)
SWITCH = "{% for m in messages %}{{ m.content }}{% endfor %} thinking={{ enable_thinking }}"


def prompt(template: str, path: str, effort: str) -> str:
    engine = ScriptedEngine(chat_template=template)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "reasoning_effort": effort,
    }
    if path == "/v1/responses":
        body = {"input": "hi", "reasoning": {"effort": effort}}
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + path, json=body, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert "x-localllm-ignored" not in reply.headers
    return str(engine.requests[-1].prompt)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("template", "effort", "said"),
    [
        (THREE, "none", "effort=low"),
        (THREE, "minimal", "effort=low"),
        (THREE, "low", "effort=low"),
        (THREE, "medium", "effort=medium"),
        (THREE, "high", "effort=high"),
        (THREE, "xhigh", "effort=high"),
        (THREE, "max", "effort=high"),
        (THREE, "ultra", "effort=high"),
        (MORE, "max", "effort=max at most"),
        (MORE, "none", "effort=none not at all"),
        (MORE, "xhigh", "effort=high"),
        (SWITCH, "none", "thinking=False"),
        (SWITCH, "max", "thinking=True"),
        (THREE + SWITCH, "none", "thinking=False"),
    ],
)
def test_an_effort_level_reaches_the_template(
    path: str, template: str, effort: str, said: str
) -> None:
    assert prompt(template, path, effort).endswith(said)
