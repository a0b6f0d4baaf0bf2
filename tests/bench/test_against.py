"""`localllm bench --against`: the same load for each server in turn.

Tokens are counted here, and no server's own figures are trusted.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from localllm.bench import against
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import DEFAULT, MEANS, Scenarios
from localllm.bench.stream import BenchTarget, StreamedAnswer
from localllm.bench.token_counts import Counter
from localllm.cli import all_commands
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import BackendError, UsageError
from localllm_backends.contract import LoadSpec
from support.http_server import running_server


@dataclass
class Said:
    """The replies of a scripted server to every chat: pieces of text, and its own count.

    Requests with the field `refuses` are refused. `answer` returns the reply to a request, if
    replies differ.
    """

    pieces: list[str] = field(default_factory=lambda: ["word "] * 12)
    answer: Callable[[dict[str, Any]], Iterable[str]] | None = None
    usage: dict[str, Any] | None = None
    refuses: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def scripted(said: Said) -> Iterator[str]:
    """Run a server with OpenAI's API that replies as in `said`. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said.keys.append(self.headers["authorization"])
            if not self.path.startswith("/v1/"):
                self._answer(404, {})
            elif said.refuses and said.refuses in body:
                self._answer(400, {"error": {"message": f"unknown field {said.refuses}"}})
            elif not body.get("stream"):
                self._answer(200, {"choices": []})
            else:
                said.bodies.append(body)
                self._stream(said.answer(body) if said.answer else said.pieces)

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, pieces: Iterable[str]) -> None:
            self.send_response(200)
            self.end_headers()
            for piece in pieces:
                chunk = {"choices": [{"delta": {"content": piece}}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.flush()
            if said.usage is not None:
                self.wfile.write(
                    f"data: {json.dumps({'choices': [], 'usage': said.usage})}\n\n".encode()
                )
            self.wfile.write(b"data: [DONE]\n\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(all_commands.app, ["bench", *arguments])


def test_two_real_servers_are_measured_in_turn_with_one_servers_tokenizer(tiny_model: Path) -> None:
    with ExitStack() as stack:
        urls = []
        for _ in range(2):
            host = Supervisor(
                WorkerOptions(LoadSpec(path=str(tiny_model), n_ctx=1024, n_seq_max=2))
            )
            urls.append(stack.enter_context(running_server({"tiny": host})).url)
        asked = [part for url in urls for part in ("--against", url)]
        done = bench(*asked, "--rounds", "1", "--scenarios", "single,two", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    first, second = (server["name"] for server in found["servers"])
    assert found["tokens_counted"].endswith(f"tokenizer of {first}")
    titles = [table["title"] for table in found["tables"]]
    even = "{}: 95th percentile of the gaps"
    assert titles == [
        "decode, one stream", even.format("one stream"), "aggregate, 2 streams",
        even.format("2 streams")
    ]  # fmt: skip
    for table in found["tables"]:
        assert all(
            len(table["values"][name]) == 1 and table["medians"][name] > 0
            for name in (first, second)
        )
        ratio = table["ratios"][second]
        assert ratio["median"] == pytest.approx(table["medians"][first] / table["medians"][second])
        assert ratio["low"] == ratio["median"] == ratio["high"]
    assert not found["faults"]


def test_our_own_server_is_measured_too_if_a_model_is_named(tiny_model: Path) -> None:
    said = Said()
    with scripted(said) as url:
        done = bench(
            str(tiny_model), "--against", url, "--rounds", "1", "--scenarios", "single", "--json"
        )
    found = json.loads(done.stdout)
    assert found["servers"][0]["name"] == "localllm"
    assert found["servers"][0]["url"].startswith("http://127.0.0.1:")
    assert found["tables"][0]["medians"]["localllm"] > 0
    assert "tokenizer of localllm" in found["tokens_counted"]


def test_an_empty_answer_is_reported_and_the_benchmark_continues() -> None:
    with (
        scripted(Said()) as good,
        scripted(Said(pieces=["", ""], usage={"completion_tokens": 128})) as empty,
    ):
        done = bench(
            "--against",
            good,
            "--against",
            empty,
            "--rounds",
            "3",
            "--scenarios",
            "single,cancel",
            "--json",
        )
    assert done.exit_code != 0
    found = json.loads(done.stdout)
    assert all("returned no text (it reports 128 tokens)" in fault for fault in found["faults"])
    assert len(found["faults"]) == 4, "each scenario is tried twice there, and then no more"
    name = found["servers"][0]["name"]
    assert len([v for v in found["tables"][0]["values"][name] if v is not None]) == 3


def test_a_token_count_too_large_for_the_text_is_not_used() -> None:
    with scripted(Said(usage={"completion_tokens": 1000})) as url:
        target = against.target_of(url)
        found = against.run([target], ["single"], 1)
    # Twelve words of five bytes are at most 60 tokens, not 1000.
    assert found.counter.differing == {target.name: (1000, 60)}
    assert "it reported 1000 tokens, but at most 60 " in "\n".join(found.lines())


def test_drafted_tokens_in_one_chunk_are_all_counted() -> None:
    answer = StreamedAnswer(
        text="one two three four", gaps_s=[0.5, 0.5], usage={"completion_tokens": 5}
    )
    assert Counter(None).tokens_of(BenchTarget("x", ""), answer) == 5
    assert answer.rate(5) == 4.0
    assert (
        Counter(None).tokens_of(BenchTarget("x", ""), StreamedAnswer(text="a b", gaps_s=[1.0])) == 2
    ), "no word of its own"


def test_a_chunk_of_one_character_is_no_stall_but_a_chunk_of_words_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counter, "tokens_in", lambda _self, text: 3 if "…" in text else 1)
    scenarios = Scenarios(Counter(None), None)
    assert scenarios.per_token_s(0.3, " …") == pytest.approx(0.1)
    assert scenarios.per_token_s(0.3, "so …") == 0.3
    assert scenarios.per_token_s(0.3, "a") == 0.3


def test_a_story_that_ends_before_the_second_request_is_followed_by_another() -> None:
    stories: list[str] = []
    answered = threading.Event()

    def answer(body: dict[str, Any]) -> Iterator[str]:
        text = body["messages"][-1]["content"]
        if not text.startswith("Long story"):
            yield from ["word "] * 8
            answered.set()
            return
        stories.append(text)
        for i in range(20 if len(stories) == 1 else 100):
            if i == 70:
                answered.wait(30)
            yield "word "

    with scripted(Said(answer=answer)) as url:
        found = against.run([against.target_of(url)], ["stall"], 1)
    assert not found.faults
    assert len(set(stories)) == 2
    assert found.to_json()["tables"][0]["values"]


def test_stories_that_all_end_too_soon_are_a_fault() -> None:
    said = Said()
    with scripted(said) as url:
        found = against.run([against.target_of(url)], ["stall"], 1)
    assert any("ended after [12, 12, 12] pieces" in fault for fault in found.faults)
    assert len(said.bodies) % 3 == 0
    assert all(body["messages"][-1]["content"].startswith("Long story") for body in said.bodies), (
        "nobody came in vain"
    )


def test_a_field_that_a_server_refuses_is_not_sent_to_it_again() -> None:
    said = Said(refuses="ignore_eos")
    with scripted(said) as url:
        done = bench("--against", url, "--rounds", "2", "--scenarios", "single", "--json")
    assert done.exit_code == 0, done.output
    assert len(said.bodies) == 2
    assert all("ignore_eos" not in body for body in said.bodies)


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (b'data: {"choices": {"0": 1}}\n', ""),
        (b'data: {"choices": [{"delta": "text"}]}\n', ""),
        (b'data: {"choices": [{"delta": {"content": 7}}]}\n', ""),
        (b'data: {"a": ' + b"[" * 50_000 + b"\n", ""),
        (b"data: {" + b"x" * (9 << 20), ""),
        (b"\x1f\x8b", "gzip"),
    ],
    ids=["choices", "delta", "content", "deep", "endless", "compressed"],
)
def test_a_malformed_stream_is_an_error_that_names_the_server(body: bytes, coding: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            if coding:
                self.send_header("content-encoding", coding)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = BenchTarget("odd", f"http://127.0.0.1:{server.server_port}/v1")
        with pytest.raises(BackendError, match="odd sent a malformed answer"):
            target.chat([{"role": "user", "content": "Hi"}], 4)
        server.shutdown()


def test_the_model_after_a_hash_is_requested_or_else_the_first_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")
    said = Said()
    with scripted(said) as url:
        assert (
            bench(
                "--against", f"{url}/v1#second", "--rounds", "1", "--scenarios", "single"
            ).exit_code
            == 0
        )
        assert against.target_of(url.removeprefix("http://")).model == "first"
    assert {body["model"] for body in said.bodies} == {"second"}
    assert set(said.keys) == {"Bearer secret"}


def test_each_server_is_started_again_by_its_own_command(tmp_path: Path) -> None:
    note = tmp_path / "started"
    command = f"{sys.executable} -c \"open('{note}', 'a').write('x')\""
    with scripted(Said()) as url:
        asked = [
            "--against",
            url,
            "--rounds",
            "2",
            "--scenarios",
            "restart",
            "--restart-cmd",
            command,
        ]
        assert bench(*asked).exit_code == 0
        assert note.read_text() == "xx"
        assert "--restart-cmd" in str(bench("--against", url, "--scenarios", "restart").exception)
        wrong = bench("--against", url, "--against", url, "--restart-cmd", command)
    assert isinstance(wrong.exception, UsageError)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999999", "http://[::1"])
def test_an_invalid_address_is_refused_with_a_clear_error(url: str) -> None:
    with pytest.raises(UsageError, match="not a valid address"):
        against.target_of(url)


def test_an_address_that_does_not_answer_is_named() -> None:
    with pytest.raises(BackendError, match="did not answer"):
        against.target_of("http://127.0.0.1:9")


def test_every_scenario_has_a_meaning_and_a_body() -> None:
    assert set(DEFAULT) <= set(MEANS)
    assert all(callable(getattr(Scenarios, f"run_{name}")) for name in MEANS)
    with pytest.raises(UsageError, match="sinlge"):
        against.parse_scenarios("single,sinlge")


def test_servers_of_one_machine_have_different_labels_within_80_columns() -> None:
    """Servers of one machine have different labels within 80 columns.

    Cut after twelve characters, both would be 127.0.0.1:86.
    """
    table = RoundComparison(
        "decode, one stream",
        "tok/s",
        "more",
        {"127.0.0.1:8601": [20.27, 21.6], "127.0.0.1:8602": [12.09, 17.41]},
    )
    shown = table.lines("127.0.0.1:8601")
    assert "127.0.0.1:8601 ÷ it: 1.46×" in shown[2]
    assert max(map(len, shown)) <= 80


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10) | st.none(), st.floats(0.1, 10) | st.none()),
        min_size=1,
        max_size=9,
    )
)
def test_ratios_use_only_the_rounds_in_which_both_servers_have_a_value(
    rounds: list[tuple[float | None, float | None]],
) -> None:
    scenarios = RoundComparison("x", "tok/s")
    for i, values in enumerate(rounds):
        for name, value in zip("ab", values, strict=True):
            if value is not None:
                scenarios.fill(name, i)
                scenarios.add(name, value)
    for name in "ab":
        scenarios.fill(name, len(rounds))
        assert len(scenarios.values[name]) == len(rounds)
    both = [a / b for a, b in rounds if a is not None and b is not None]
    ratios = scenarios.ratios("a", "b")
    assert (ratios.rounds if ratios is not None else ()) == tuple(both)
    assert all(len(line) <= 120 for line in scenarios.lines("a"))
