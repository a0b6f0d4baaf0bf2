"""An exported conversation contains all messages of all branches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.conversation.history import History
from localllm.errors import UsageError
from localllm_tui.control import import_export
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.import_export import to_json, to_markdown
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer


def _answered(session: Session, text: str, reasoning: str = "") -> None:
    answer = PendingAnswer(session)
    answer.add(text, reasoning)
    answer.finish({"finish_reason": "stop"})


@pytest.fixture
def session(history: History) -> Session:
    session = Session(history, "m", system="Be brief")
    session.ask("what?")
    _answered(session, "this", "hm")
    _answered(session, "that")
    session.set_system("Rhyme")
    session.ask("and?")
    return session


def test_markdown_contains_versions_reasoning_and_system_prompts_in_place(session: Session) -> None:
    assert to_markdown(session) == (
        "# what?\n\n## System\n\nBe brief\n\n## You\n\nwhat?\n\n## m\n\nthat\n\n"
        "<details><summary>version 1 of "
        "2</summary>\n\n<details><summary>thinking</summary>\n\nhm\n\n</details>\n\n"
        "this\n\n</details>\n\n## System\n\nRhyme\n\n## You\n\nand?\n"
    )


def test_json_contains_every_branch(session: Session) -> None:
    said = json.loads(to_json(session))
    assert (said["format"], said["title"], said["model"]) == ("localllm-conversation", "what?", "m")
    assert [(m["role"], m["content"]) for m in said["messages"]] == [
        ("system", "Be brief"),
        ("user", "what?"),
        ("assistant", "this"),
        ("assistant", "that"),
        ("system", "Rhyme"),
        ("user", "and?"),
    ]
    assert said["head"] == said["messages"][-1]["id"]
    assert said["messages"][2]["reasoning"] == "hm"


def _shape(history: History, conv_id: str) -> list[tuple[object, ...]]:
    """Return a conversation's content without its ids."""
    turns, head = history.tree(conv_id)
    place = {0: 0} | {t.id: i for i, t in enumerate(turns, 1)}
    return [
        (place[head],),
        *(
            (
                t.role,
                t.content,
                t.reasoning or "",
                t.meta,
                t.complete,
                t.created_s,
                place[t.parent_id],
            )
            for t in turns
        ),
    ]


def test_an_exported_json_is_imported_with_all_branches(
    session: Session, history: History, tmp_path: Path
) -> None:
    session.other_version(session.turns[1], -1)
    session.ask("on the other branch")
    file = tmp_path / "chat.json"
    file.write_text(to_json(Session(history, "m", conv_id=session.id)), encoding="utf-8")
    (again,) = import_export.import_file(history, file, "other").ids
    assert _shape(history, again) == _shape(history, str(session.id))
    assert history.get(again).model == "m"


@pytest.mark.parametrize(
    "said",
    ["not json", "[]", "{}", "3", '[{"chat": 3}]', '{"mapping": [1]}',
     '{"format": "localllm-conversation", "version": 2, "messages": []}',
     '{"format": "localllm-conversation", "version": 1, "messages": [{"id": 1, "role": "root", '
     '"content": "x"}]}'],
)  # fmt: skip
def test_an_invalid_import_file_is_refused_and_adds_no_conversation(
    said: str, history: History, tmp_path: Path
) -> None:
    file = tmp_path / "x.json"
    file.write_text(said)
    with pytest.raises(UsageError):
        import_export.import_file(history, file, "m")
    assert history.list() == []


def chatgpt(*parts: object, role: object = "user", **more: object) -> dict[str, object]:
    return {"message": {"author": {"role": role}, "content": {"parts": [*parts]}, **more}}


def test_an_export_of_chatgpt_keeps_branches_and_names_what_it_leaves_out(
    history: History, tmp_path: Path
) -> None:
    mapping = {
        "root": {"children": ["a"], "message": None},
        "a": {"parent": "root", "children": ["b", "c"], **chatgpt("what?", create_time=5.0)},
        "b": {"parent": "a", **chatgpt("this", role="assistant", metadata={"model_slug": "gpt"})},
        "c": {"parent": "a", "children": ["d"], **chatgpt("hm", role=7)},
        "d": {"parent": "c", "children": ["a"], **chatgpt({"text": "that"}, role="assistant")},
    }
    file = tmp_path / "conversations.json"
    export = [
        {"title": "Old", "mapping": mapping, "current_node": "b"},
        {"title": "bad", "mapping": 3},
        {"title": "New", "mapping": {"x": chatgpt("later", create_time=9.0)}},
    ]
    file.write_text(json.dumps(export))
    imported = import_export.import_file(history, file, "m")
    new, old = imported.ids
    assert history.get(new).title == "New"
    assert [m.content for m in history.messages(old)] == ["what?", "this"]
    assert sorted(m.content for m in history.tree(old)[0]) == ["that", "this", "what?"]
    assert history.get(old).model == "gpt"
    assert imported.skipped == [
        "[0].mapping.c.message.author.role is a number, not text",
        "[1].mapping is a number, not an object",
    ]
    assert "2 conversations" in imported.note(file)
    assert "author.role" in imported.note(file)


def test_an_export_of_open_webui_keeps_its_branches(history: History, tmp_path: Path) -> None:
    messages = {
        "1": {"parentId": None, "childrenIds": ["2", "3"], "role": "user", "content": "what?"},
        "2": {"parentId": "1", "role": "assistant", "content": "this", "model": "x"},
        "3": {"parentId": "1", "role": "assistant", "content": [{"text": "that"}], "model": "x"},
    }
    file = tmp_path / "chat.json"
    chat = {"title": "T", "history": {"messages": messages, "currentId": "2"}}
    file.write_text(json.dumps([{"id": "c", "chat": chat}]))
    (conv,) = import_export.import_file(history, file, "m").ids
    assert [m.content for m in history.messages(conv)] == ["what?", "this"]
    assert len(history.tree(conv)[0]) == 3
    assert history.get(conv).model == "x"


def test_the_thinking_in_an_export_of_open_webui_is_thinking(
    history: History, tmp_path: Path
) -> None:
    thinking = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> hm\n&gt; so\n</details>\n'
    messages = {
        "1": {"childrenIds": ["2"], "role": "user", "content": thinking},
        "2": {"parentId": "1", "role": "assistant", "content": f"{thinking}this"},
    }
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"chat": {"history": {"messages": messages, "currentId": "2"}}}]))
    (conv,) = import_export.import_file(history, file, "m").ids
    question, answer = history.messages(conv)
    assert (question.content, question.reasoning) == (thinking, None)
    assert (answer.content, answer.reasoning) == ("this", "hm\nso")


def test_thinking_without_an_end_in_an_export_is_text_however_often_it_begins(
    history: History, tmp_path: Path
) -> None:
    """A pattern with both ends would search the whole rest of the text at each beginning."""
    text = '<details type="reasoning">\n' * 40_000
    messages = {
        "1": {"childrenIds": ["2"], "role": "user", "content": "hi"},
        "2": {"parentId": "1", "role": "assistant", "content": text},
    }
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"chat": {"history": {"messages": messages, "currentId": "2"}}}]))
    (conv,) = import_export.import_file(history, file, "m").ids
    answer = history.messages(conv)[1]
    assert (answer.content, answer.reasoning) == (text, None)


def test_entries_of_an_export_without_a_conversation_are_named(
    history: History, tmp_path: Path
) -> None:
    export = [{"mapping": {"x": chatgpt("later")}}, {"title": "None\n", "mapping": {}}, 7]
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(export))
    note = import_export.import_file(history, file, "m").note(file)
    assert "[2] is no conversation" in note
    assert "None has no message with text" in note


def test_a_document_format_that_is_not_written_is_refused(
    drive: Any, server: ScriptedServer, tmp_path: Path
) -> None:
    async def play(d: Driver) -> None:
        await d.send(f"/save {tmp_path / 'chat.pdf'}")
        await d.until(lambda: "can't write a .pdf file" in d.screen())

    drive(play)
    assert not (tmp_path / "chat.pdf").exists()
