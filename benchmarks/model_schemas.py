"""Realistic pydantic and zod schemas as the form of an answer: is each answer valid?

    python -m benchmarks.model_schemas URL MODEL [--models N] [--seeds N] [--first SEED]
        [--limit TOKENS] [--streams N]

An answer is valid if it parses and has only declared members. Half of the models are pydantic's,
made here by a generator. The other half are the JSON schemas that zod prints
(data/zod_schemas.json, made by data/zod_schemas.mjs). Every other model is sent as `format` of
Ollama's API, the others as `response_format`. An answer that the limit truncates is counted
separately. Several requests run at once, so that each step of the engine serves several answers.

"""

from __future__ import annotations

import argparse
import enum
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import httpx
import jsonschema
from pydantic import BaseModel, ConfigDict, Field, create_model

_ZOD = Path(__file__).with_name("data") / "zod_schemas.json"
_MOST_TRIES = 20
_TOPICS = (
    "Invoice", "Recipe", "Person", "Meeting", "Ticket", "Product", "Review", "Flight", "Song",
    "Patient", "Contract", "Experiment", "Sprint", "Vehicle", "Course", "Citation", "Order",
    "Location", "Weather", "Sentiment", "Entity", "Plan", "Expense", "Survey", "Movie",
)  # fmt: skip
_TEXTS = ("title", "name", "summary", "description", "author", "city", "notes", "reason", "email")
_NUMBERS = ("amount", "count", "score", "year", "price", "quantity", "rating", "age", "confidence")


class Priority(enum.Enum):
    """An enumeration of texts."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Address(BaseModel):
    """A nested model."""

    street: str
    city: str
    zip_code: str | None = None


class Step(BaseModel):
    """A model that contains itself."""

    explanation: str = Field(description="what is done")
    substeps: list[Step] = Field(default_factory=list, max_length=2)


class Cat(BaseModel):
    """One of a union that `kind` tells apart."""

    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """The other."""

    kind: Literal["dog"]
    breed: str


Made = tuple[str, Any]


def _text(rng: random.Random) -> Made:
    return rng.choice(_TEXTS), rng.choice([str, str | None])


def _described(rng: random.Random) -> Made:
    name = rng.choice(_TEXTS)
    return name, (str, Field(description=f"the {name}, in a few words", max_length=60))


def _number(rng: random.Random) -> Made:
    return rng.choice(_NUMBERS), rng.choice([int, float, int | None])


def _bounded(rng: random.Random) -> Made:
    name = rng.choice(_NUMBERS)
    return name, rng.choice([(int, Field(ge=0, le=100)), (float, Field(gt=0.0, lt=1.0))])


def _choice(rng: random.Random) -> Made:
    kinds = [Literal["positive", "negative", "neutral"], Priority, Priority | None]
    return rng.choice(["kind", "priority", "label"]), rng.choice(kinds)


def _several(rng: random.Random) -> Made:
    name = rng.choice(["tags", "items", "keywords", "authors"])
    return name, (rng.choice([list[str], list[int], set[str]]), Field(max_length=3))


def _moment(rng: random.Random) -> Made:
    return rng.choice(["created_at", "due", "id"]), rng.choice([date, datetime, UUID])


def _nested(rng: random.Random) -> Made:
    return rng.choice(["address", "place"]), rng.choice([Address, Address | None])


def _listed(rng: random.Random) -> Made:
    return "steps", (list[Step], Field(min_length=1, max_length=2))


def _union(rng: random.Random) -> Made:
    return "pet", rng.choice([(Cat | Dog, Field(discriminator="kind")), Cat | Dog, Cat | str])


def _flag(rng: random.Random) -> Made:
    return rng.choice(["is_active", "paid", "done"]), rng.choice([bool, (bool, False)])


def _mapping(rng: random.Random) -> Made:
    return "metadata", (dict[str, str], Field(default_factory=dict, max_length=2))


def _pair(rng: random.Random) -> Made:
    return "position", rng.choice([tuple[float, float], tuple[int, str]])


_FIELDS: Sequence[Callable[[random.Random], Made]] = (
    _text, _text, _described, _number, _number, _bounded, _choice, _several, _moment, _nested,
    _listed, _union, _flag, _mapping, _pair,
)  # fmt: skip


def pydantic_schema(seed: int) -> dict[str, Any]:
    """Return the JSON schema of one generated model."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {}
    for make in rng.sample(_FIELDS, rng.randint(2, 5)):
        name, kind = make(rng)
        fields[name] = kind if isinstance(kind, tuple) else (kind, ...)
    config = ConfigDict(extra="forbid") if rng.random() < 0.2 else ConfigDict()
    model = create_model(_TOPICS[seed % len(_TOPICS)], __config__=config, **fields)
    return model.model_json_schema()


def schemas(count: int) -> list[dict[str, Any]]:
    """Return `count` schemas, alternating between pydantic and zod."""
    zod = json.loads(_ZOD.read_text(encoding="utf-8"))
    pairs = zip((pydantic_schema(seed) for seed in range(len(zod))), zod, strict=True)
    return [schema for pair in pairs for schema in pair][:count]


def closed(schema: Any) -> Any:
    """Return `schema` with every object closed, unless its schema states otherwise."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        parts.setdefault("additionalProperties", False)
    return parts


def posted(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Return the response to `body`, which is sent again while the server is busy. Raises
    httpx.HTTPStatusError."""
    for _ in range(_MOST_TRIES):
        reply = http.post(path, json=body)
        if reply.status_code != 503:
            break
        time.sleep(float(reply.headers.get("retry-after", 1)))
    return reply.raise_for_status()


def answer(
    http: httpx.Client, model: str, schema: dict[str, Any], seed: int, limit: int, ollama: bool
) -> str | None:
    """Return the answer's text, or None if the limit truncated it."""
    topic = schema.get("title") or schema.get("description") or "record"
    messages = [{"role": "user", "content": f"Make up a short {topic}. Answer in JSON."}]
    if ollama:
        options = {"seed": seed, "num_predict": limit}
        body = {"model": model, "messages": messages, "format": schema, "stream": False}
        reply = posted(http, "/api/chat", {**body, "options": options}).json()
        return None if reply["done_reason"] == "length" else reply["message"]["content"]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"model": model, "messages": messages, "response_format": form, "seed": seed}
    reply = posted(http, "/v1/chat/completions", {**body, "max_tokens": limit})
    choice = reply.json()["choices"][0]
    return None if choice["finish_reason"] == "length" else choice["message"]["content"]


def verdict(text: str | None, schema: dict[str, Any]) -> str:
    """Return "cut", "valid", or the fault of an answer."""
    if text is None:
        return "cut"
    try:
        jsonschema.Draft202012Validator(closed(schema)).validate(json.loads(text))
    except ValueError:
        return "does not parse"
    except jsonschema.ValidationError as e:
        return "undeclared member" if e.validator == "additionalProperties" else "invalid"
    return "valid"


def examined(
    http: httpx.Client, given: argparse.Namespace, seed: int, number: int, schema: dict[str, Any]
) -> tuple[str, str | None]:
    """Request one answer, and return its verdict and its text."""
    try:
        text = answer(http, given.model, schema, seed, given.limit, number % 4 > 1)
    except httpx.HTTPStatusError as e:
        return "refused", e.response.text
    return verdict(text, schema), text


def main() -> None:
    """Request an answer for every schema with every seed, and print the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    asked = schemas(given.models)
    with (
        httpx.Client(base_url=given.url, timeout=1800, trust_env=False) as http,
        ThreadPoolExecutor(given.streams) as streams,
    ):
        for seed in range(given.first, given.first + given.seeds):
            ask = partial(examined, http, given, seed)
            answers = streams.map(ask, range(len(asked)), asked)
            for number, (found, text) in enumerate(answers):
                counts[found] += 1
                if found not in ("valid", "cut"):
                    print(f"model {number}, seed {seed}: {found}: {text}", flush=True)
            print(f"seeds {given.first} to {seed}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
