"""A hostile template makes only the requests of its own model fail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

_ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Each letter takes as long as a page does in other templates.
_DEAR = (
    "{% for letter in messages[0].content %}{% for j in range(1500) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
_ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def test_other_models_answer_while_a_template_runs_endlessly() -> None:
    models = {"endless": ScriptedEngine(chat_template=_ENDLESS), "plain": ScriptedEngine()}
    with (
        running_server(models) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(8) as people,
    ):

        def ask(model: str) -> httpx.Response:
            return client.post("/v1/chat/completions", json={**_ASKED, "model": model})

        assert ask("plain").is_success
        slow = [people.submit(ask, "endless") for _ in range(8)]
        assert all(client.get("/health").is_success for _ in range(20))
        assert not all(reply.done() for reply in slow)
        answers = [reply.result() for reply in slow]
        assert {r.status_code for r in answers} <= {400, 503}
        ended = [r.json()["error"]["message"] for r in answers if r.status_code == 400]
        assert ended
        assert all("it takes more than" in message for message in ended)
        # From now on the template runs in its own process, so other requests end before it does.
        again = people.submit(ask, "endless")
        assert all(ask("plain").is_success for _ in range(20))
        assert not again.done()


def test_a_short_conversation_is_written_while_a_long_one_is_slow() -> None:
    with (
        running_server({"dear": ScriptedEngine(chat_template=_DEAR)}) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(1) as person,
    ):

        def ask(text: str) -> httpx.Response:
            asked = {**_ASKED, "messages": [{"role": "user", "content": text}]}
            return client.post("/v1/chat/completions", json=asked)

        for _ in range(2):
            long = person.submit(ask, "a" * 20_000)
            answered = 0
            while not long.done():
                assert ask("hi").is_success
                answered += 1
            assert long.result().status_code == 400  # more than the context holds
            assert answered > 3
