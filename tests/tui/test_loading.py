"""The chat opens at once and loads the model in the background.

Questions sent meanwhile wait for the model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from localllm.conversation.history import History
from localllm.errors import DoesNotFitError, LocalLLMError
from localllm_tui.app import ChatApp
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import EngineProgress
from tui.conftest import Driver
from tui.scripted_models import ScriptedModelService
from tui.scripted_sse import ScriptedServer


class Engine:
    """An engine whose loading a test controls."""

    model, api_key, unix_socket, ours = "scripted", None, "", True

    def __init__(self, base_url: str = "", where: str = "") -> None:
        self.base_url, self.where = base_url, where
        self.now = EngineProgress("loading", 0.0)
        self.started = self.stopped = False

    def start(self) -> None:
        self.started = True

    def progress(self) -> EngineProgress:
        return self.now

    def stop(self) -> None:
        self.stopped = True


def test_a_question_waits_for_the_model_and_is_answered(drive: Any, server: ScriptedServer) -> None:
    engine = Engine()
    server.answer("Bonjour")

    async def play(d: Driver) -> None:
        await d.until(lambda: engine.started)
        await d.send("hello in French")
        engine.now = EngineProgress("loading", 0.42)
        await d.until(lambda: "loading scripted 42%" in d.screen().splitlines()[0])
        await d.until(lambda: "loading scripted 42%…" in d.screen())  # also at the answer's place
        assert server.requests == []
        engine.now = EngineProgress()
        await d.until(lambda: not d.app.chat.answering)
        assert "Bonjour" in d.screen()
        assert "loading" not in d.screen()
        await d.until(lambda: d.app.chat.listed.n_ctx == 1000)

    drive(play, engine=engine)


def test_a_question_that_waits_for_the_model_runs_before_planning(
    drive: Any, server: ScriptedServer
) -> None:
    engine = Engine()
    service = ScriptedModelService()
    server.answer("Bonjour")

    async def play(d: Driver) -> None:
        await d.until(lambda: engine.started)
        await d.until(lambda: "starter model" in d.screen())
        await d.send("hello in French")
        engine.now = EngineProgress()
        await d.until(lambda: not d.app.chat.answering)
        assert "Bonjour" in d.screen()
        assert service.requests == []

    drive(play, engine=engine, model_service=service, first_run=True, size=(100, 40))


_WAITS_UNTIL_HTTPX_IS_READ = """
import asyncio, sys
from localllm.errors import LocalLLMError
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import EngineProgress

class Engine:
    model, unix_socket, looks = "m", "", 0
    def progress(self):
        self.looks += 1
        if "httpx" in sys.modules or self.looks > 200:
            return EngineProgress("failed", 0.0, LocalLLMError("the end"), down=True)
        return EngineProgress("loading")

async def main():
    engine = Engine()
    assert "httpx" not in sys.modules
    try:
        async for _ in ChatClient("http://127.0.0.1:9/v1", engine=engine).stream("m", []):
            pass
    except LocalLLMError:
        print(engine.looks)

asyncio.run(main())
"""


def test_the_code_of_a_request_is_imported_while_the_model_loads() -> None:
    """The code that a request needs is imported while the model loads.

    Otherwise the import would take a third of the wait for the first token.
    """
    looks = subprocess.run(
        [sys.executable, "-c", _WAITS_UNTIL_HTTPX_IS_READ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(looks.stdout) <= 3


def test_a_failed_load_shows_its_error_and_hint_and_the_chat_stays_open(
    drive: Any, server: ScriptedServer
) -> None:
    engine = Engine()
    server.answer("here")

    async def play(d: Driver) -> None:
        await d.until(lambda: engine.started)
        await d.type("half a thought")
        engine.now = EngineProgress(
            "failed", 0.0, DoesNotFitError("it needs 40.0 GB", hint="take a smaller one")
        )
        await d.until(lambda: "it needs 40.0 GB" in d.screen())
        assert "take a smaller one" in d.screen()
        assert "/model shows the other" in d.screen()
        assert d.app.page.composer.text == "half a thought"
        await d.press("enter")  # a retry, since memory may be free by now
        await d.until(lambda: not d.app.chat.answering)
        assert "here" in d.screen()

    drive(play, engine=engine)


def test_a_waiting_answer_ends_with_the_error_of_the_load(
    drive: Any, server: ScriptedServer
) -> None:
    engine = Engine()

    async def play(d: Driver) -> None:
        await d.send("q")
        engine.now = EngineProgress("failed", 0.0, LocalLLMError("no such weights"))
        await d.until(lambda: "no such weights" in d.screen())
        await d.until(lambda: not d.app.chat.answering)
        assert d.screen().count("no such weights") == 1
        assert server.requests == []

    drive(play, engine=engine)


def test_a_question_that_waits_for_the_model_can_be_stopped(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.send("q")
        await d.until(lambda: d.app.chat.answering)
        await d.press("escape")
        await d.until(lambda: not d.app.chat.answering)
        assert "Stopped before the answer started" in d.screen()

    drive(play, engine=Engine())


def test_the_chat_shows_its_server_and_a_solution_if_the_server_is_gone(
    drive: Any, server: ScriptedServer
) -> None:
    async def play(d: Driver) -> None:
        assert d.screen().splitlines()[0].strip() == "attached to nas:11535"
        server.__exit__()
        await d.send("q")
        await d.until(lambda: "/own" in d.screen())
        assert "the connection to the server broke" in d.screen()

    engine = Engine(where="nas:11535")
    engine.now = EngineProgress()
    drive(play, engine=engine)


def test_other_models_answer_after_one_failed_to_load(tiny_model: Path, tmp_path: Path) -> None:
    """If a model cannot be loaded, another installed model can answer in the same chat.

    This uses the real engine and a broken file, which is reported.
    """
    import asyncio
    import shutil

    from localllm.cli.chat.own_server import OwnEngine
    from localllm.library import store
    from localllm.settings import Settings

    library = tmp_path / "library"
    library.mkdir()
    shutil.copy(tiny_model, library / "sound.gguf")
    store.adopt(library)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:-1000])
    engine = OwnEngine(str(broken), Settings({"context": 512}))

    async def main() -> None:
        with History(tmp_path / "c.db") as history:
            client = ChatClient(engine.base_url, engine.api_key, {"max_tokens": 4}, engine=engine)
            app = ChatApp(ChatOptions(client, history, engine.model))
            app.chat.idle_after_s = None
            async with app.run_test(size=(100, 30)) as pilot:
                d = Driver(app, pilot)
                await d.send("hello")
                await d.until(lambda: "Error:" in d.screen())
                assert "broken" in d.screen()
                await d.send("/model sound")
                await d.until(lambda: "sound answers from now on" in d.screen())
                await d.send("/retry")
                await d.until(
                    lambda: app.chat.session.last_answer is not None and not app.chat.answering
                )
                assert app.chat.session.last_answer is not None
                assert app.chat.session.last_answer.meta["completion_tokens"] > 0
            await client.aclose()

    try:
        asyncio.run(main())
    finally:
        engine.stop()
    assert engine.progress().error is not None
