"""The effect of other keys on a shared server: leaks of a guessed prompt, and heavy requests.

python -m benchmarks.neighbours [--only guess|heavy|gates] [--rounds 20] [--model FILE]

guess   A key sends a prompt. Another key sends the same one, and a new one: the times to the first
        token must be equal. The first key's own time for its prompt again shows the effect that a
        leak would have.
heavy   A small chat's first token, alone and while ten bodies of many MB are read at once, for each
        kind. Bar: twice as long.
gates   The same during one expensive request of each kind (tests/support/heavy_requests.py), and
        during eight schemas that take long to compile. Bars: a small chat's first token twice as
        long as alone, and at most 0.5 s; a small schema's 1 s; /health 0.1 s; a template's own
        answer 2 s. "a small schema" compared with "alone" is the cost of a schema.

"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import httpx

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from benchmarks.rounds import interleave, report
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import unseen_text, user
from localllm.bench.stream import BenchTarget, free_port
from tests.models.first_layers import write_first_layers
from tests.support.heavy_requests import KINDS, TEMPLATE, chat

_KEYS = {"anna": "anna-anna-anna-anna-anna", "bob": "bob-bob-bob-bob-bob-bob"}
_GUESSED_WORDS = 40
_BODIES = 10
# The model with the hostile template.
_SECOND = "templates"


def _chat(content: object, **fields: object) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
    ).encode()


# Each body is as large as allowed, or almost.
HEAVY: dict[str, Callable[[], bytes]] = {
    "one text": lambda: _chat("word " * 4_000_000),
    "many messages": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "hi"}] * 49_000}
    ).encode(),
    "many parts": lambda: _chat([{"type": "text", "text": "hi"}] * 49_000),
    "many stops": lambda: _chat("hi", stop=["x"] * 990_000),
    "unknown fields": lambda: _chat("hi", **{f"x{i}": [i] for i in range(49_000)}),
    "a large schema": lambda: _chat(
        "hi",
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"type": "object", "properties": {f"p{i}": {} for i in range(45_000)}},
            },
        },
    ),
    "512 large tools": lambda: _chat(
        "hi",
        tools=[
            {
                "type": "function",
                "function": {
                    "name": f"f{i}",
                    "parameters": {"properties": {f"p{j}": {} for j in range(90)}},
                },
            }
            for i in range(512)
        ],
    ),
}


def guess(server: BenchTarget, rounds: int) -> RoundComparison:
    """Measure the first tokens of a guessed prompt, a new one, and the key's own again."""
    asked = {name: BenchTarget(name, server.url, key=key) for name, key in _KEYS.items()}
    table = RoundComparison("first token of a prompt", "s", "less")
    for i in range(rounds):
        own, fresh = (unseen_text(_GUESSED_WORDS, 2 * i + which) for which in range(2))
        asked["anna"].chat(user(own), 2)
        tries = [("guessed", own), ("fresh", fresh)]
        cached = []
        for name, prompt in tries if i % 2 else reversed(tries):
            answer = asked["bob"].chat(user(prompt), 2)
            table.add(name, answer.ttft_s)
            cached.append(answer.cached_tokens or 0)
        # The template's beginning, which is cached for bob after his first request, and a part of
        # the first word.
        assert max(cached) < 40, f"cached_tokens tell what another has asked: {cached}"
        table.add("one's own again", asked["anna"].chat(user(own), 2).ttft_s)
    return table


def heavy(server: BenchTarget, rounds: int) -> RoundComparison:
    """Measure the first tokens of a small chat, alone and during each kind of body."""
    table = RoundComparison(
        f"first token of a small chat beside {_BODIES} bodies at once", "s", "less"
    )
    target = BenchTarget("anna", server.url, key=_KEYS["anna"])
    headers = {
        "authorization": f"Bearer {_KEYS['bob']}",
        "content-type": "application/json",
        "content-encoding": "gzip",
    }

    def post(body: bytes) -> None:
        httpx.post(
            f"{server.url}/chat/completions",
            content=body,
            headers=headers,
            timeout=300,
            trust_env=False,
        )

    def small() -> float:
        return target.chat(user("hi"), 2).ttft_s

    packed = {kind: gzip.compress(make(), 1) for kind, make in HEAVY.items()}
    small()

    def one(kind: str, body: bytes) -> None:
        table.add("alone", statistics.median(small() for _ in range(5)))
        threads = [threading.Thread(target=post, args=[body]) for _ in range(_BODIES)]
        for thread in threads:
            thread.start()
        times = []
        while any(thread.is_alive() for thread in threads):
            times.append(small())
        table.add(f"{kind}, median", statistics.median(times))
        table.add(f"{kind}, longest", max(times))
        for thread in threads:
            thread.join()

    interleave(rounds, *(partial(one, kind, body) for kind, body in packed.items()))
    return table


def gates(server: BenchTarget, rounds: int) -> list[RoundComparison]:
    """Measure the waits of others during each heavy request, the longest of each round, and the
    time of the heavy request itself."""
    first = RoundComparison("first token of a small chat", "s", "less")
    formed = RoundComparison("first token of a small schema", "s", "less")
    health = RoundComparison("/health", "s", "less")
    taken = RoundComparison("the heavy request's own answer", "s", "less")
    target = BenchTarget("anna", server.url, key=_KEYS["anna"])
    names = count()

    def small(schema: object = None) -> float:
        fields = {} if schema is None else {"json_schema": schema}
        asked = {"messages": user("hi"), "max_tokens": 4, "temperature": 0}
        return target.stream({**asked, **fields}).ttft_s

    def new_schema() -> dict[str, object]:
        property_name = f"b{next(names)}"
        return {"type": "object", "properties": {property_name: {"type": "string"}}}

    def post(body: object) -> float:
        headers = {"authorization": f"Bearer {_KEYS['bob']}"}
        begun = time.perf_counter()
        httpx.post(
            f"{server.url}/chat/completions",
            json=body,
            headers=headers,
            timeout=300,
            trust_env=False,
        )
        return time.perf_counter() - begun

    def looked() -> float:
        begun = time.perf_counter()
        httpx.get(f"{server.root}/health", trust_env=False)
        return time.perf_counter() - begun

    def alone() -> None:
        for _ in range(5):
            first.add("alone", small())
            formed.add("alone, known", small({"type": "object"}))
            formed.add("alone", small(new_schema()))
            health.add("alone", looked())

    def beside(kind: str, bodies: Sequence[object]) -> None:
        waits: dict[str, list[float]] = {"chat": [0.0], "schema": [0.0], "health": [0.0]}
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = [pool.submit(post, body) for body in bodies]
            while not all(one.done() for one in asked):
                waits["health"].append(looked())
                waits["chat"].append(small())
                waits["schema"].append(small(new_schema()))
            taken.add(kind, max(one.result() for one in asked))
        for table, name in ((first, "chat"), (formed, "schema"), (health, "health")):
            table.add(kind, max(waits[name]))

    slow = [chat(json_schema={"type": "integer", "multipleOf": 9_973 - 2 * i}) for i in range(8)]
    # A slow template slows the requests of its own model.
    kinds = {
        name: [kind.make(2**kind.usual) | ({"model": _SECOND} if "template" in name else {})]
        for name, kind in KINDS.items()
        if not kind.sees
    }
    kinds["eight slow schemas"] = slow
    small({"type": "object"})
    interleave(rounds, alone, *(partial(beside, kind, bodies) for kind, bodies in kinds.items()))
    return [first, formed, health, taken]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["guess", "heavy", "gates"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    with empty_home() as home:
        config = home / "config" / "config.toml"
        config.parent.mkdir()
        config.write_text(
            "".join(f'[keys.{name}]\nenv = "KEY_{name}"\n' for name in _KEYS), encoding="utf-8"
        )
        os.environ.update({f"KEY_{name}": key for name, key in _KEYS.items()})
        port = free_port()
        model, second = arguments.model or smollm2(), []
        if arguments.only == "gates":
            path = home / f"{_SECOND}.gguf"
            second = [str(write_first_layers(smollm2(), path, 3, template=TEMPLATE))]
        command = serve_command(model, port, *second, "--context", "8192", "--quiet")
        server = Server("localllm", command, port, key=_KEYS["anna"])
        server.start()
        try:
            few = max(1, arguments.rounds // 10)
            if arguments.only in (None, "guess"):
                report([guess(server.target, arguments.rounds)], "guessed")
            if arguments.only in (None, "heavy"):
                report([heavy(server.target, few)], "alone")
            if arguments.only == "gates":
                report(gates(server.target, few), "alone")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
