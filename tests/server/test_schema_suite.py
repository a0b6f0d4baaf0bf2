"""JSON schemas: an accepted schema is always satisfied, and an unsupported one is refused by name.

The schemas are those of the public JSON-Schema-Test-Suite (draft 2020-12; source and licence in
the file of cases). The generator is an adversary: it writes random tokens that the grammar
allows. It prefers the schema's own words or single characters (escapes), and is steered to an
end after forty tokens. `LOCALLLM_GENERATIONS=8` makes that many answers per schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import UnsupportedError
from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.http_server import running_server

CASES = json.loads(
    Path(__file__).with_name("test_schema_suite_cases.json").read_text(encoding="utf-8")
)
# Obsolete keywords of older drafts, which llguidance ignores.
OLD = [
    ("divisibleBy", {"type": "number", "divisibleBy": 2}),
    ("disallow", {"disallow": "string"}),
    ("extends", {"properties": {"a": {"extends": {"type": "string"}}}}),
]
# The formats that are enforced. Any other format is an annotation.
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
PER_SCHEMA = int(os.environ.get("LOCALLLM_GENERATIONS", "1"))
FREE_TOKENS, MAX_TOKENS = 40, 400


def _exact_multiple(
    validator: Any, divisor: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Check multipleOf with the decimal text: in binary, 2.102 is not a multiple of 0.0001."""
    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {divisor}")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _exact_multiple}
)


class Adversary:
    """A generator of random answers under a constraint."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.compile = backend, GrammarCompiler(backend)
        self.n_vocab, self.eog = backend.info.n_vocab, set(backend.info.eog_tokens)
        self.pieces = [backend.token_bytes(t) for t in range(self.n_vocab)]
        self.ending = np.array([self._ends(t) for t in range(self.n_vocab)], dtype=np.float32)
        self.single = np.array([9.0 if len(p) == 1 else 0.0 for p in self.pieces], dtype=np.float32)

    def _ends(self, token: int) -> float:
        piece = self.pieces[token].strip()
        if token in self.eog:
            return 100.0
        known = {
            b'"': 80.0,
            b"}": 60.0,
            b"]": 60.0,
            b'":': 45.0,
            b"0": 30.0,
            b"1": 30.0,
            b"5": 30.0,
            b",": -20.0,
        }
        return known.get(piece, -30.0 if not piece else 40.0 if piece[:1] in b"}]" else 0.0)

    def write(self, schema: Any, seed: int) -> str | None:
        """Return one answer, or None if it did not end."""
        constraint = self.compile(("json_schema", json.dumps(schema)))
        rng = np.random.default_rng(seed)
        taste = np.zeros(self.n_vocab, dtype=np.float32)
        if seed % 3 == 1:
            taste[self.backend.tokenize(json.dumps(schema), special=False)] = 9.0
        elif seed % 3 == 2:
            taste = self.single
        said: list[int] = []
        while len(said) < MAX_TOKENS and not constraint.finished:
            row = rng.gumbel(size=self.n_vocab).astype(np.float32) + taste
            if len(said) >= FREE_TOKENS:
                row += self.ending
            constraint.apply(row)
            token = int(row.argmax())
            assert np.isfinite(row[token]), "the grammar allows nothing"
            if token in self.eog:
                break
            constraint.accept(token)
            said.append(token)
        else:
            if not constraint.finished:
                return None
        return b"".join(self.pieces[t] for t in said).decode()


@pytest.fixture(scope="module")
def adversary(smollm2: Path) -> Iterator[Adversary]:
    backend = llamacpp.load(LoadSpec(str(smollm2), n_ctx=256))
    yield Adversary(backend)
    backend.close()


def test_every_accepted_schema_is_satisfied(adversary: Adversary) -> None:
    written, endless = 0, []
    for i, case in enumerate(CASES["enforced"]):
        validator = Validator(case["schema"], format_checker=FORMATS)
        for k in range(PER_SCHEMA):
            text = adversary.write(case["schema"], seed=i + k)
            if text is None:
                endless.append(case["name"])
                continue
            written += 1
            # A float has 53 bits. A multiple with many digits is exact only in decimal.
            number = Decimal if "multipleOf" in json.dumps(case["schema"]) else float
            problem = next(validator.iter_errors(json.loads(text, parse_float=number)), None)
            assert problem is None, (case["name"], text, problem.message)
    # One endless answer is no fault of the schema. Many would show that this test checks too
    # little.
    assert len(endless) <= 0.03 * written, endless
    assert written >= 150 * PER_SCHEMA


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda c: c["name"])
def test_an_unsupported_keyword_is_refused_by_name(
    adversary: Adversary, case: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        adversary.compile(("json_schema", json.dumps(case["schema"])))
    for word in case["says"]:
        assert word in refusal.value.message, refusal.value.message


@pytest.mark.parametrize(("word", "schema"), OLD, ids=lambda v: v if isinstance(v, str) else "")
def test_keywords_of_other_drafts_are_refused_by_name(
    adversary: Adversary, word: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=word):
        adversary.compile(("json_schema", json.dumps(schema)))


def test_a_property_may_be_named_like_a_keyword(adversary: Adversary) -> None:
    schema = {
        "properties": {"extends": {"const": 1}},
        "enum": [{"extends": 1}],
        "required": ["extends"],
    }
    written = adversary.write({**schema, "type": "object"}, 0)
    assert written is not None
    assert json.loads(written) == {"extends": 1}


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[openai.OpenAI]:
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(smollm2), n_ctx=1024, n_seq_max=2)))
    with (
        running_server({"smollm2": supervisor}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c,
    ):
        yield c


def _ask(client: openai.OpenAI, schema: Any, seed: int = 0) -> Any:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Fill in the form."}],
        response_format=wanted,
        temperature=1.5,
        seed=seed,
        max_tokens=120,
    )


WORDS = sorted(
    {w for c in CASES["refused"] for w in c["says"] if len(c["says"]) == 1 and w.isalpha()}
    - {"Resource"}
)


@pytest.mark.parametrize("word", WORDS)
def test_over_http_a_refusal_is_a_400_with_the_word(client: openai.OpenAI, word: str) -> None:
    schema = next(c["schema"] for c in CASES["refused"] if c["says"] == [word])
    with pytest.raises(openai.BadRequestError, match=word):
        _ask(client, schema)


@pytest.mark.long
def test_the_real_model_satisfies_twenty_schemas(client: openai.OpenAI) -> None:
    """These schemas allow only small values, because the model must end by itself."""
    kinds = (
        "const",
        "enum",
        "required",
        "prefixItems",
        "maxItems",
        "minimum",
        "pattern",
        "anyOf",
        "type",
        "allOf",
    )
    chosen = [c for c in CASES["enforced"] if c["name"].split(":")[0] in kinds][::3][:20]
    assert len(chosen) == 20
    ended = 0
    for seed, case in enumerate(chosen):
        choice = _ask(client, case["schema"], seed).choices[0]
        if choice.finish_reason == "length":
            continue
        ended += 1
        Validator(case["schema"]).validate(json.loads(choice.message.content))
    assert ended >= 8
