"""Malformed lists of models from an upstream.

This server's own list stays readable, and the log names the malformed part.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import httpx
import pytest

from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.proxy.upstreams import Upstream, Upstreams
from support.http_server import running_server
from support.malformed_listings import MOST_BYTES, listings, mark
from support.raw_server import answering
from support.scripted_engine import ScriptedEngine

MODEL = {"id": "m", "context_length": 4096}
FIELDS = (
    "id", "created", "context_length", "max_model_len", "capabilities", "architecture", "status",
    "meta",
)  # fmt: skip
PLACES: dict[str, Any] = {
    "listing": mark(),
    "data": {"data": mark()},
    "entry": {"data": [MODEL, mark()]},
    **{field: {"data": [{**MODEL, field: mark()}]} for field in FIELDS},
    "within meta": {"data": [{**MODEL, "meta": {"n_ctx": mark()}}]},
}
ALL = [*listings(PLACES)]


@pytest.mark.parametrize(("name", "body"), ALL, ids=[name for name, _ in ALL])
def test_our_own_list_stays_readable(name: str, body: Any) -> None:
    sent = body()
    with answering(sent) as url:
        local = ServedModel("tiny", ScriptedEngine())
        upstreams = Upstreams([Upstream("lab", f"{url}/v1")])
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        with running_server(ModelRouter([local], upstreams=upstreams)) as running:
            for path in ("/v1/models", "/api/tags"):
                answer = httpx.get(running.url + path, trust_env=False, timeout=60)
                assert answer.status_code == 200
                json.loads(answer.text, parse_constant=pytest.fail)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak - before < MOST_BYTES


def test_the_log_names_the_malformed_part(caplog: pytest.LogCaptureFixture) -> None:
    with answering(b'{"data": {"a": 1}}') as url:
        upstreams = Upstreams([Upstream("lab", f"{url}/v1")])
        with running_server(ModelRouter([], upstreams=upstreams)) as running:
            httpx.get(f"{running.url}/v1/models", trust_env=False)
    assert "the upstream lab can't be used: data is an object, not a list" in caplog.text
