"""The server's behaviour for every field it knows.

The tables in rows_*.py are the documentation. Each row is a request.

A row is honoured (the effect is visible in the engine's request or in the reply), tolerated (no
effect on the answer; named in x-localllm-ignored if the field is unknown) or refused (a 4xx with
a reason). No field that would change the answer is accepted and ignored.
"""

from __future__ import annotations

import json

import httpx
import pytest

from localllm.server.models.router import ServedModel
from server.rows import Row, as_said
from server.rows_completions import COMPLETIONS
from server.rows_openai import OPENAI
from server.rows_others import OTHERS
from support.http_server import running_server
from support.scripted_engine import BOS, ScriptedEngine

ROWS = [*OPENAI, *COMPLETIONS, *OTHERS]


def test_the_table_is_long_enough_and_has_no_twins() -> None:
    names = [(r.path, r.name) for r in ROWS]
    assert len(ROWS) >= 120
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(fim_tokens={"pre": 200, "suf": 201, "mid": 202}, bos_token=BOS)


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    with (
        running_server([ServedModel("tiny", engine, aliases=("small",))]) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.path}: {r.name}"[:90])
def test_every_row_of_the_conformance_table_holds(
    row: Row, http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = row.script
    engine.requests.clear()
    data = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    response = http.post(row.path, content=data, headers={"content-type": "application/json"})
    assert as_said(row, response, engine.requests[-1] if engine.requests else None)
