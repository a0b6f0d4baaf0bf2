"""A constrained answer that ends by itself is complete, for any grammar, schema and banned
tokens."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.drive import run
from grammars.byte_matcher import allows, matcher_of
from grammars.test_gbnf import some_grammar
from grammars.test_json_schema import some_schema
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Sampling
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.grammars.gbnf import lark_of
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for

CASES = int(os.environ.get("LOCALLLM_DEAD_ENDS", "45"))
PROMPT = "<|im_start|>user\nDescribe a cat.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine(few_layers: Path) -> Iterator[Engine]:
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=512))
    engine = Engine(backend, EngineSettings(make_matcher=GrammarCompiler(backend)))
    yield engine
    engine.close()


def a_dead_end(rng: random.Random) -> Any:
    """Return a schema that leads, or may lead, to a state in which no token is allowed."""
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}
    parts: list[Any] = [
        {"$ref": "#/$defs/e"},
        {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "object", "maxProperties": 0}]},
        {
            "type": "object",
            "patternProperties": {"^b": False, "^a": {"type": "string"}},
            "required": [rng.choice("ab")],
        },
        {
            "type": "object",
            "patternProperties": {".*": {"$ref": "#/$defs/e"}},
            "additionalProperties": False,
        },
        {
            "type": "string",
            "minLength": 3,
            "pattern": rng.choice(["^ab?$", "^[0-9]{2,}$", r"^[^\\]{2,4}$"]),
        },
        {"type": "number", "minimum": 3, "maximum": rng.choice([2, 3, 3.5])},
        {
            "type": "array",
            "items": {"$ref": "#/$defs/e"},
            "minItems": rng.choice([0, 1]),
            "maxItems": 2,
        },
    ]
    inner = rng.choice(parts)
    schema = {
        "type": "object",
        "properties": {"x": inner, "y": some_schema(rng, 1)},
        "required": rng.sample(["x", "y"], 1),
    }
    return {
        **rng.choice([schema, {"anyOf": [schema, inner]}]),
        "additionalProperties": False,
        "$defs": {"e": endless},
    }


def banned(engine: Engine, rng: random.Random) -> dict[int, float]:
    """Ban every token that contains one of some random letters. Tokens that the grammar needs may
    be among them."""
    letters = set(rng.sample(list(b'"}]ae01,:xb&'), rng.choice([0, 0, 1, 2])))
    tokens = range(engine.backend.info.n_vocab) if letters else ()
    return {t: -math.inf for t in tokens if letters & set(engine.backend.token_bytes(t))}


def test_a_constrained_answer_that_stops_is_complete(engine: Engine) -> None:
    ends: Counter[str] = Counter()
    for seed in range(CASES):
        rng = random.Random(seed)
        kind = ("json_schema", "gbnf", "json_schema")[seed % 3]
        schema: Any = a_dead_end(rng) if seed % 3 else some_schema(rng, 2)
        source = some_grammar(rng) if kind == "gbnf" else json.dumps(schema)
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.0, 3.0]), seed=seed, logit_bias=banned(engine, rng)
        )
        outcome = run(
            engine,
            request_for("a", PROMPT, max_tokens=30, sampling=sampling, grammar=(kind, source)),
        )
        if not hasattr(outcome.ends["a"][0], "reason"):
            assert outcome.failure("a").code in ("unsupported_parameter", "constraint_stuck"), (
                seed,
                source,
            )
            ends[outcome.failure("a").code] += 1
            continue
        reason, text = outcome.finish("a").reason, outcome.text.get("a", "")
        ends[reason] += 1
        if reason == "length":
            continue
        assert reason == "stop", (seed, source, text)
        if kind == "gbnf":
            assert allows(matcher_of(LLMatcher.grammar_from_lark(lark_of(source))), text), (
                seed,
                source,
                text,
            )
        else:
            assert jsonschema.Draft201909Validator(schema).is_valid(json.loads(text)), (
                seed,
                source,
                text,
            )
    assert (
        min(ends["stop"], ends["unsupported_parameter"] + ends["constraint_stuck"]) > CASES / 10
    ), ends
