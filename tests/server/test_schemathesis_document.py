"""Requests made from our OpenAPI document.

None causes a 500, and every reply has the declared format.

`LOCALLLM_EXAMPLES=1000` sends more requests per operation than a normal test run. The long tests
also try every boundary of a schema, which are thousands.
"""

from __future__ import annotations

import os
import re
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from schemathesis import checks
from schemathesis.generation import GenerationMode

from localllm.server.app import create_app
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter, ServedModel
from support.examples import NEW
from support.scripted_engine import BOS, ScriptedEngine

EXAMPLES = int(os.environ.get("LOCALLLM_EXAMPLES", "20" if NEW else "6"))
BOUNDARIES = (hypothesis.Phase.explicit,) if NEW else ()


def _app() -> Any:
    engine = ScriptedEngine(fim_tokens={"pre": 200, "suf": 201, "mid": 202}, bos_token=BOS)
    return create_app(
        ModelRouter([ServedModel("tiny", engine)]),
        settings=ServerSettings(allowed_hosts=("testserver", "localhost")),
    )


document = schemathesis.openapi.from_asgi("/openapi.json", _app())
document.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


def _test_of(label: str) -> Any:
    """Return the test of one operation, under its own name.

    pytest distinguishes tests that run in parallel by their names.
    """

    @document.include(name=label).parametrize()
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=EXAMPLES < 100,
        database=None,
        phases=[*BOUNDARIES, hypothesis.Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def test(case: Any) -> None:
        reply = case.call_and_validate(
            checks=[
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
        )
        # The toy tokenizer has no tokens for the letters that a decision needs.
        assert reply.status_code < 500 or (
            reply.status_code == 501 and label == "POST /v1/systemone"
        )

    return test


for _operation in document.get_all_operations():
    _label = _operation.ok().label
    globals()[
        "test_replies_are_as_documented_" + re.sub(r"\W+", "_", _label.lower()).strip("_")
    ] = _test_of(_label)
