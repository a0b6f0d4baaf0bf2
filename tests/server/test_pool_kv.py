"""A pool prefills a system prompt once.

The other servers copy its KV from the server that computed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.server.http.accounts import NamedKey, digest_of
from localllm.server.models.router import ServedModel
from localllm.server.proxy.pool import PoolNode, by_preference, kv_holders, system_key
from models import tiny_gguf
from server.test_kv_transfer import loaded_server, worker
from server.test_pool import Front, begun, pooled, user
from support.engine_thread import EngineThread
from support.http_server import Running
from support.scripted_backend import ScriptedBackend, ScriptedResult
from support.until import until

OWN_KEY = "own-own-own-own-own"
KEY = "pool-pool-pool-pool"
POOL = NamedKey("pool", digest_of(KEY.encode()), admin=True, kv=True)
N_SYSTEM = 20_000
SYSTEM = {"role": "system", "content": "You answer briefly. " * (N_SYSTEM // 20)}
# The tokens of all questions and answers are far fewer than those of the system prompt.
N_QUESTIONS = 64


class Blocking(ScriptedBackend):
    """A backend that waits in the step after `free_tokens` tokens until it is `released`.

    With None it never waits.
    """

    free_tokens: int | None = None

    def __init__(self) -> None:
        super().__init__(n_ctx=2 * N_SYSTEM, n_batch=512, n_seq_max=8)
        self.blocked = threading.Event()
        self.released = threading.Event()

    def cells_free(self) -> int:
        """Return the size of the context: the cells are too many to count or to run out."""
        return self.info.n_ctx

    def step(self, chunks: Any) -> ScriptedResult:
        if self.free_tokens is not None and self.computed_tokens >= self.free_tokens:
            self.blocked.set()
            self.released.wait(60)
        return super().step(chunks)


class Server:
    """A server of the pool.

    Its engine starts with the first request, when all addresses are known.
    """

    def __init__(self) -> None:
        self.backend = Blocking()
        self.others: list[str] = []
        self.thread: EngineThread | None = None

    async def engine(self) -> EngineThread:
        if self.thread is None:
            self.thread = EngineThread(
                self.backend,
                kv_from=self.others,
                prefill_key=KEY,
                model_name="tiny",
                prefill_patience_s=600.0,
            )
        return self.thread

    async def close(self) -> None:
        if self.thread is not None:
            await self.thread.close()

    @property
    def asked(self) -> int:
        """Return the number of requests for this server's KV."""
        return len(self.thread.sent) if self.thread is not None else 0


@contextmanager
def pool(n: int) -> Iterator[tuple[Front, list[Server], list[Any]]]:
    servers = [Server() for _ in range(n)]
    with ExitStack() as stack:
        running = [begun(stack, ServedModel("tiny", server), keys=(POOL,)) for server in servers]
        for server in servers:
            server.others = [r.url for r in running]
        yield stack.enter_context(pooled(*(r.url for r in running), pool_key=KEY)), servers, running


def first_question(i: int) -> list[dict[str, Any]]:
    return [SYSTEM, user(f"question {i}")]


def ask(front: Front, i: int) -> httpx.Response:
    return front.ask(first_question(i), max_tokens=1)


def home(front: Front) -> int:
    """Return the index of the server that computes the system prompt."""
    key = system_key({"model": "tiny", "messages": first_question(0)})
    return int(by_preference(front.front.nodes, key, 0.0)[0].name)


def test_a_system_prompt_is_prefilled_once_and_its_kv_copied_to_other_servers() -> None:
    with pool(8) as (front, servers, _), ThreadPoolExecutor(16) as clients:
        answers = [*clients.map(partial(ask, front), range(N_QUESTIONS))]
        assert [a.status_code for a in answers] == [200] * N_QUESTIONS
        at = home(front)
        assert servers[at].backend.computed_tokens >= N_SYSTEM
        assert sum(s.backend.computed_tokens for s in servers) < 1.5 * N_SYSTEM
        assert 0 < servers[at].asked <= 7
        assert sum(s.asked for s in servers) == servers[at].asked
        assert any("were read by 127.0.0.1" in a.headers["x-localllm-cache"] for a in answers)


def test_the_next_server_prefills_a_system_prompt_if_the_first_is_killed() -> None:
    with pool(8) as (front, servers, running), ThreadPoolExecutor(16) as clients:
        at = home(front)
        killed = servers[at].backend
        killed.free_tokens = N_SYSTEM // 2
        n_questions = 24
        asking = [clients.submit(ask, front, i) for i in range(n_questions)]
        try:
            until(killed.blocked.is_set)
            until(lambda: servers[at].asked > 0)
            running[at].stop()
            answers = [each.result() for each in asking]
        finally:
            killed.released.set()
        assert [a.status_code for a in answers] == [200] * n_questions
        others = [s.backend.computed_tokens for s in servers if s is not servers[at]]
        assert N_SYSTEM <= sum(others) < 1.5 * N_SYSTEM


def test_a_server_requests_kv_only_from_servers_before_it_in_the_order() -> None:
    nodes = [PoolNode(str(i), f"http://10.0.0.{i}:80") for i in range(8)]
    order = by_preference(nodes, b"system", 0.0)
    names = [node.url.removeprefix("http://") for node in order]
    assert kv_holders(nodes, b"system", order[0], 0.0) == []
    assert kv_holders(nodes, b"system", order[2], 0.0) == names[:2]
    assert kv_holders(nodes, b"system", order[7], 0.0) == names[:3]
    assert kv_holders(nodes, None, order[7], 0.0) == []
    order[0].failed_s = 0.0
    assert kv_holders(nodes, b"system", order[2], 1.0) == names[1:2]


# --- real models ----------------------------------------------------------------------------------

# More tokens than the least number that is copied, for models whose tokens are bytes or words.
LONG = {"role": "system", "content": "You answer in short words. " * 60}


def chat(
    server: Running, question: str, holder: Running | None = None, **more: Any
) -> httpx.Response:
    """Send a request like a pool's front, which names the `holder` of the system prompt."""
    headers = {"authorization": f"Bearer {KEY}"}
    if holder is not None:
        headers["x-localllm-kv-from"] = f"127.0.0.1:{holder.port}"
    body = {"model": "few", "messages": [LONG, user(question)], "temperature": 0, "max_tokens": 8}
    body |= {"ignore_eos": True, **more}
    url = server.url + "/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=120)


def words_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(tiny_gguf.write_llama, id="attention"),
        pytest.param(tiny_gguf.write_hybrid, id="recurrent and attention"),
    ],
)
def test_the_text_is_the_same_after_a_copied_system_prompt(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf")
    own = NamedKey("own", digest_of(OWN_KEY.encode()), kv=True)
    with loaded_server(worker(path), keys=(POOL, own)) as holder:
        engine = {"kv_from": [holder.url], "prefill_key": KEY, "prefill_patience_s": 600.0}
        here = worker(path, **engine, model_name="few")
        with loaded_server(here, keys=(POOL,)) as asking:
            alone = words_of(chat(holder, "Where is it?"))
            answer = chat(asking, "Where is it?", holder)
            assert words_of(answer) == alone
            note = answer.headers["x-localllm-cache"]
            assert "tokens were read by 127.0.0.1" in note
            read_there = int(note.split("; ")[-1].split()[0])
            assert 1024 <= read_there < answer.json()["usage"]["prompt_tokens"]
            # KV that the holder had computed for its own request was not computed again.
            page = httpx.get(
                holder.url + "/metrics",
                headers={"authorization": f"Bearer {KEY}"},
                trust_env=False,
            ).text
            assert metric_in(page, "prefilled_tokens_total") < 1.5 * read_there
            assert "were read by" not in chat(asking, "Where?").headers["x-localllm-cache"]
            salted = chat(asking, "Where is it?", holder, cache_salt="another user")
            assert words_of(salted) == alone


def metric_in(page: str, name: str) -> float:
    rows = [row for row in page.splitlines() if row.startswith(f"localllm_{name}")]
    return sum(float(row.split()[-1]) for row in rows)
