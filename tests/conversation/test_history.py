"""The history keeps all text through threads, crashes and searches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.conversation.history import History, HistoryError
from localllm.errors import NotFoundError
from support.examples import examples


@pytest.fixture
def history(tmp_path: Path):
    with History(tmp_path / "private" / "conversations.db") as store:
        yield store


def test_messages_come_back_in_order_with_all_their_parts(history: History) -> None:
    conv = history.create("Greetings", "smollm2")
    history.append(conv, "user", "hi")
    history.append(conv, "assistant", "hello", reasoning="be kind", meta={"tok_s": 12.5})
    user, answer = history.messages(conv)
    assert (user.role, user.content, user.reasoning, user.complete) == ("user", "hi", None, True)
    assert (answer.content, answer.reasoning, answer.meta) == ("hello", "be kind", {"tok_s": 12.5})
    assert user.id < answer.id


def test_turn_texts_contain_the_typed_text_without_attached_files(history: History) -> None:
    conv = history.create("Greetings", "m")
    history.append(conv, "system", "be brief")
    first = history.append(conv, "user", "a file: " + "x" * 900, meta={"typed": "read this"})
    history.append(conv, "assistant", "done")
    last = history.append(conv, "user", "thank you")
    other = history.create("another", "m")
    history.append(other, "user", "elsewhere")
    assert [turn.text for turn in history.newest_turns(conv, 2)] == ["done", "thank you"]
    assert [turn.text for turn in history.newest_turns(conv, 9)] == [
        "read this", "done", "thank you"
    ]  # fmt: skip
    assert [(t.turn_id, t.text) for t in history.questions(conv, 4)] == [
        (first, "read"), (last, "than")
    ]  # fmt: skip
    assert [turn.text for turn in history.turn_text(conv, first)] == ["read this"]
    assert history.turn_text(other, first) == []


def test_the_list_is_newest_first_and_a_new_message_moves_a_conversation_up(
    history: History,
) -> None:
    first, second = history.create("one", "m"), history.create("two", "m")
    assert [c.id for c in history.list()] == [second, first]
    history.append(first, "user", "again")
    assert [c.id for c in history.list()] == [first, second]
    assert [c.n_messages for c in history.list()] == [1, 0]
    assert len(history.list(limit=1)) == 1


def test_search_finds_titles_and_contents_and_takes_wildcards_literally(history: History) -> None:
    a = history.create("Recipe for bread", "m")
    b = history.create("Other", "m")
    history.append(b, "user", "how do I bake at 100% humidity")
    assert [c.id for c in history.list("BREAD")] == [a]
    assert [c.id for c in history.list("100%")] == [b]
    assert history.list("a%d") == []
    assert history.list("_") == []


def test_a_streaming_answer_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    code = (
        "import os, sys; from localllm.conversation.history import History\n"
        f"h = History({str(path)!r}); c = h.create('t', 'm'); h.append(c, 'user', 'q')\n"
        "m = h.append(c, 'assistant', '', complete=False); h.update_partial(m, 'half an ans', "
        "reasoning='hm')\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with History(path) as again:
        (conv,) = again.list()
        _, answer = again.messages(conv.id)
        assert (answer.content, answer.reasoning, answer.complete) == ("half an ans", "hm", False)
        again.update_partial(answer.id, "half an answer", complete=True)
        last = again.messages(conv.id)[-1]
        assert (last.content, last.reasoning, last.complete) == ("half an answer", "hm", True)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_only_the_owner_can_read_the_history(history: History) -> None:
    history.create("secret", "m")
    for file in history.path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file.name
    assert history.path.parent.stat().st_mode & 0o077 == 0


def test_rename_remove_and_delete(history: History) -> None:
    conv = history.create("a", "m")
    ids = [history.append(conv, "user", str(i)) for i in range(4)]
    history.rename(conv, "b")
    assert (history.get(conv).title, history.get(conv).titled) == ("b", 2)
    assert history.remove(ids[2]) == 2
    assert [m.content for m in history.messages(conv)] == ["0", "1"]
    history.delete(conv)
    assert history.list() == []


@pytest.mark.parametrize(
    "act",
    [
        lambda h: h.append("nope", "user", "x"),
        lambda h: h.messages("nope"),
        lambda h: h.get("nope"),
        lambda h: h.rename("nope", "x"),
        lambda h: h.delete("nope"),
        lambda h: h.remove(99),
        lambda h: h.set_head("nope", 0),
        lambda h: h.update_partial(99, "x"),
    ],
)
def test_unknown_conversations_and_turns_raise_not_found(history: History, act) -> None:
    with pytest.raises(NotFoundError):
        act(history)


def test_threads_share_one_store(history: History) -> None:
    conv = history.create("busy", "m")

    def write(n: int) -> None:
        for i in range(20):
            history.append(conv, "user", f"{n}-{i}")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    contents = [m.content for m in history.messages(conv)]
    assert len(set(contents)) == 80
    for n in range(4):
        mine = [c for c in contents if c.startswith(f"{n}-")]
        assert mine == [f"{n}-{i}" for i in range(20)]


def test_a_file_that_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.write_bytes(b"not a database, far from it" * 100)
    with pytest.raises(HistoryError, match="can't be opened"):
        History(path)


def test_a_folder_that_can_t_be_made_is_named_without_codes_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "data" / "c.db"
    with pytest.raises(HistoryError) as error:
        History(path)
    assert error.value.message == f"the conversations can't be opened: Not a directory ({path})"


def test_a_newer_schema_is_refused_not_damaged(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "c.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(HistoryError, match="newer release"):
        History(path)


@settings(max_examples=examples(30))
@given(texts=st.lists(st.text(), max_size=8))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    with History(tmp_path_factory.mktemp("h") / "c.db") as store:
        conv = store.create("t", "m")
        for text in texts:
            store.append(conv, "user", text)
        assert [m.content for m in store.messages(conv)] == texts
