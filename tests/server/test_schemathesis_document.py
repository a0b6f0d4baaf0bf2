"""Our OpenAPI document, taken at its word: requests made from it are never a 500, replies have the form it declares.

`LOCALLLM_EXAMPLES=1000` asks for more requests per operation than every test run makes.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from schemathesis import checks
from schemathesis.generation import GenerationMode

from localllm.server.app import create_app
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter, ServedModel
from support.scripted_engine import BOS, ScriptedEngine

EXAMPLES = int(os.environ.get("LOCALLLM_EXAMPLES", "8"))


def _app() -> Any:
    engine = ScriptedEngine(fim_tokens={"pre": 200, "suf": 201, "mid": 202}, bos_token=BOS)
    return create_app(
        ModelRouter([ServedModel("tiny", engine)]), settings=ServerSettings(allowed_hosts=("testserver", "localhost"))
    )


document = schemathesis.openapi.from_asgi("/openapi.json", _app())
document.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@document.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_replies_are_as_documented(case: Any) -> None:
    case.call_and_validate(
        checks=[
            checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )
