"""Saved prompts, recent conversations by number, HTML pages, and the chat's own engine."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from localllm.conversation.history import History
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.html_page import to_html
from localllm_tui.control.interfaces import EngineProgress
from localllm_tui.control.session import Session
from localllm_tui.control.stream_reader import start_again
from tui.conftest import Driver
from tui.scripted_sse import Drop, Say, ScriptedServer
from tui.test_loading import Engine


def test_prompts_are_saved_and_used(drive: Any, server: ScriptedServer, history: History) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.send("/prompt")
        await d.until(lambda: "there is no saved prompt" in d.screen())
        await d.send("/save-prompt review Look for bugs\nand name the line")
        await d.until(lambda: "/prompt review puts it" in d.screen())
        await d.send("/prompt review in main.py")
        await d.until(
            lambda: d.app.page.composer.text == "Look for bugs\nand name the line\n\nin main.py"
        )
        await d.press("ctrl+c")
        await d.ask("an ordinary question")
        await d.send("/save-prompt plain")
        await d.send("/prompt plain")
        await d.until(lambda: d.app.page.composer.text == "an ordinary question")
        await d.press("ctrl+c")
        await d.send("/prompt reviw")
        await d.until(lambda: "did you mean review?" in d.screen())
        await d.send("/save-prompt ../evil x")
        await d.until(lambda: "can't be the name of a prompt" in d.screen())

    drive(play)
    names = sorted(path.name for path in (history.path.parent / "prompts").iterdir())
    assert names == ["plain.md", "review.md"]


def test_a_number_opens_a_recent_conversation_or_is_a_question_if_none_is_listed(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("four")
    ids = [history.create(title, "scripted") for title in ("first", "second")]
    for conv_id in ids:
        history.append(conv_id, "user", "an earlier question")

    async def play(d: Driver) -> None:
        await d.until(lambda: "2. first" in d.screen())
        await d.send("2")
        await d.until(lambda: d.app.chat.session.id == ids[0])
        assert server.requests == []
        await d.send("/new")
        await d.until(lambda: d.app.chat.session.id is None)
        assert d.app.page.composer.text == ""
        await d.ask("4")
        assert server.requests[0]["messages"][-1]["content"] == "4"
        await d.ask("2")
        assert server.requests[1]["messages"][-1]["content"] == "2"

    server.answer("two")
    drive(play)


class Tags(HTMLParser):
    """The tags and addresses of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href") or name.startswith("on"):
                self.addresses.append(value or "")


EVIL = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> [a](javascript:alert(1)) "
    "![p](data:text/html,x) </section></body> {title} %s"
)


def test_html_contains_all_turns_and_no_active_content(history: History) -> None:
    session = Session(history, f"<b>model</b>{EVIL}", system=EVIL)
    session.ask(f"**what?** {EVIL}")
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n\n![x](data:image/png;base64,AAAA)"
    for text, thought in ((f"one {EVIL}\n\n```html\n{EVIL}\n```", ""), (table, EVIL)):
        answer = PendingAnswer(session)
        answer.add(text, thought)
        answer.finish({"finish_reason": "stop"})
    session.rename(f"title {EVIL}")
    page = to_html(session)
    found = Tags(page)
    assert not {"script", "iframe", "link", "object", "form", "b"} & set(found.tags)
    assert found.addresses == ["data:image/png;base64,AAAA"]
    assert "default-src 'none'" in page
    assert {"table", "details", "pre", "strong"} <= set(found.tags)
    assert found.tags.count("section") == page.count("</section>") == 3


def test_save_writes_html(drive: Any, server: ScriptedServer, tmp_path: Path) -> None:
    server.answer("*yes*")

    async def play(d: Driver) -> None:
        await d.ask("so?")
        await d.send(f"/save {tmp_path / 'chat.html'}")
        await d.until(lambda: (tmp_path / "chat.html").exists())

    drive(play)
    assert "<em>yes</em>" in (tmp_path / "chat.html").read_text()


@pytest.mark.parametrize(("ours", "named"), [(True, True), (False, False)])
def test_own_replaces_a_server_that_stopped(
    drive: Any, server: ScriptedServer, ours: bool, named: bool
) -> None:
    server.play(Say(["half"]), Drop())
    attached = Engine(server.base_url, where="nas:80")
    attached.now = EngineProgress()
    attached.ours = ours
    made: list[str] = []
    with ScriptedServer() as other:
        other.answer("from here")

        def own(model: str) -> Engine:
            made.append(model)
            engine = Engine(other.base_url)
            engine.now = EngineProgress()
            return engine

        async def play(d: Driver) -> None:
            await d.ask("q")
            await d.until(lambda: "/more continues it" in d.screen())
            assert ("localllm serve" in d.screen()) == named
            assert "/own" in d.screen()
            await d.send("/own")
            await d.until(lambda: "is loaded in this chat" in d.screen())
            assert made == ["scripted"]
            await d.ask("/retry")
            await d.until(lambda: "from here" in d.screen())
            assert len(other.requests) == 1

        drive(play, engine=attached, own=own, size=(120, 40))


def test_the_hint_of_an_own_engine_names_no_server() -> None:
    hint = start_again(Engine())
    assert "serve" not in hint
    assert "--continue" in hint


@pytest.mark.parametrize(("where", "ours"), [("", False), ("host:1", True), ("host:1", False)])
def test_a_hint_outside_the_chat_names_none_of_its_commands(where: str, ours: bool) -> None:
    engine = Engine()
    engine.where = where
    engine.ours = ours
    hint = start_again(engine, in_chat=False)
    assert hint
    assert "/own" not in hint
    assert "--continue" not in hint
