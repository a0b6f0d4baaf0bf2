"""The history is a tree of turns.

Branches stay separate, searches find all of them, and older files lose no data.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.conversation.history import History, HistoryError, StoredMessage, TurnGoneError
from support.examples import examples

# A file of the release before this one: versions of answers, files, system prompts, and an answer
# that was cut when the program was killed.
OLD_FILE = Path(__file__).with_name("schema_1.sql")


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "conversations.db") as store:
        yield store


def _texts(turns: list[StoredMessage]) -> list[str]:
    return [m.content for m in turns]


def _old(tmp_path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(tmp_path / "conversations.db", isolation_level=None)
    db.executescript(OLD_FILE.read_text(encoding="utf-8"))
    return db


def test_branches_stay_separate_and_the_head_selects_the_shown_one(history: History) -> None:
    conv = history.create("t", "m")
    question = history.append(conv, "user", "q")
    one = history.append(conv, "assistant", "one")
    history.append(conv, "user", "after one")
    two = history.append(conv, "assistant", "two", parent=question)
    assert _texts(history.messages(conv)) == ["q", "two"]
    assert history.versions(conv, question, "assistant") == [one, two]
    history.set_head(conv, one)
    assert _texts(history.messages(conv)) == ["q", "one"]
    assert len(history.tree(conv)[0]) == 4


def test_a_system_prompt_is_no_turn(history: History) -> None:
    conv = history.create("t", "m")
    history.append(conv, "system", "be brief")
    question = history.append(conv, "user", "q")
    history.append(conv, "system", "rhyme")
    history.append(conv, "assistant", "a")
    assert [m.role for m in history.messages(conv)] == ["system", "user", "system", "assistant"]
    assert history.versions(conv, question, "assistant") == [history.tree(conv)[1]]
    assert history.get(conv).n_messages == 2


def test_removing_a_turn_removes_the_turns_after_it(history: History) -> None:
    conv = history.create("t", "m")
    question = history.append(conv, "user", "q")
    gone = history.append(conv, "assistant", "one")
    history.append(conv, "user", "after one")
    kept = history.append(conv, "assistant", "two", parent=question)
    history.set_head(conv, kept - 1)
    assert history.remove(gone) == 2
    assert history.tree(conv)[1] == question
    history.set_head(conv, kept)
    assert _texts(history.messages(conv)) == ["q", "two"]
    for follow in (
        lambda: history.append(conv, "user", "x", parent=gone),
        lambda: history.set_head(conv, gone),
    ):
        with pytest.raises(TurnGoneError):
            follow()


def test_a_file_of_the_previous_release_is_upgraded_without_loss(tmp_path: Path) -> None:
    db = _old(tmp_path)
    before = {
        r[0]: r
        for r in db.execute("SELECT id, content, reasoning, complete, created_s FROM messages")
    }
    conversations = db.execute("SELECT * FROM conversations ORDER BY rowid").fetchall()
    lists = {
        c[0]: [
            r[0]
            for r in db.execute(
                "SELECT content FROM messages WHERE conversation_id = ? ORDER BY id", (c[0],)
            )
        ]
        for c in conversations
    }
    db.close()
    for _ in range(2):  # the second time it has the current schema
        with History(tmp_path / "conversations.db") as now:
            found = {c.id: c for c in now.list()}
            assert [
                (c.id, c.title, c.model, c.created_s, c.updated_s)
                for c in (found[c[0]] for c in conversations)
            ] == (conversations)
            for conv_id, texts in lists.items():
                assert _texts(now.messages(conv_id)) == texts
                for m in now.messages(conv_id):
                    assert (m.id, m.content, m.reasoning, int(m.complete), m.created_s) == before[
                        m.id
                    ]
            coin = now.messages(conversations[0][0])
            answer = next(m for m in coin if m.content == "on its edge")
            versions = now.versions(conversations[0][0], answer.parent_id, "assistant")
            by_id = {m.id: m for m in now.tree(conversations[0][0])[0]}
            assert [by_id[n].content for n in versions] == ["heads", "tails", "on its edge"]
            assert by_id[versions[0]].reasoning == "fair coin"
            assert by_id[versions[0]].meta["completion_tokens"] == 4
            assert all("earlier" not in m.meta for m in coin)
            assert [h.message_id for h in now.search("tails")] == [versions[1]]
            assert now.search("half an answ")  # the answer never finished: not indexed


def test_the_previous_release_cannot_open_or_write_to_an_upgraded_file(
    tmp_path: Path,
) -> None:
    open_before = _old(tmp_path)
    with History(tmp_path / "conversations.db") as now:
        conv = now.list()[0].id
        # the newer schema refuses values above 1
        assert open_before.execute("PRAGMA user_version").fetchone()[0] == 2
        with pytest.raises(sqlite3.IntegrityError):
            open_before.execute(
                "INSERT INTO messages (conversation_id, role, content, reasoning, meta, complete, "
                "created_s)"
                " VALUES (?, 'user', 'x', NULL, '{}', 1, 0.0)",
                (conv,),
            )
    open_before.close()


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    db = _old(tmp_path)
    db.execute("UPDATE messages SET meta = 'broken' WHERE id = 14")
    with pytest.raises(HistoryError):
        History(tmp_path / "conversations.db")
    assert db.execute("PRAGMA user_version").fetchone()[0] == 1
    assert db.execute("SELECT COUNT(*) FROM messages").fetchone()[0] == 15
    db.close()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("BRÜCKE", ["über die Brücke"]),
        ("brücke über", ["über die Brücke"]),  # words in any order
        ("の質問", ["日本語の質問"]),
        ("日", ["日本語の質問"]),  # shorter than the index supports
        ('"', ['say "x"']),
        ('"x"', ['say "x"']),
        ("100%", ["100% sure"]),
        ("nowhere", []),
        ("AND OR NOT", []),
    ],
)
def test_words_are_found_in_any_script(history: History, query: str, found: list[str]) -> None:
    conv = history.create("t", "m")
    for text in ("über die Brücke", "日本語の質問", 'say "x"', "100% sure", "100 or so"):
        history.append(conv, "user", text)
    assert [h.snippet for h in history.search(query)] == found


def test_a_search_hit_has_its_position(history: History) -> None:
    conv = history.create("t", "m")
    n = history.append(conv, "user", "word " * 50 + "the\nNeedle here " + "word " * 50)
    (hit,) = history.search("needle")
    assert (hit.conversation_id, hit.message_id, hit.role) == (conv, n, "user")
    assert hit.snippet[hit.at : hit.end] == "Needle"
    assert len(hit.snippet) <= 121
    assert "\n" not in hit.snippet


def test_search_follows_changes_of_turns(history: History) -> None:
    conv = history.create("t", "m")
    n = history.append(conv, "assistant", "streaming", complete=False)
    assert history.search("streaming")
    history.update_partial(n, "streaming ends", complete=True)
    history.update_partial(n, "rewritten", complete=True)
    assert (len(history.search("rewritten")), len(history.search("streaming"))) == (1, 0)
    history.remove(n)
    assert not history.search("rewritten")
    other = history.create("t", "m")
    history.append(other, "user", "goes with its conversation")
    history.delete(other)
    assert not history.search("goes with")


def test_ten_thousand_turns_are_searched_by_their_index(history: History) -> None:
    conv = history.create("t", "m")
    words = ["harbour", "lantern", "copper", "meadow", "signal", "winter", "orchid", "gravel"]
    with closing(sqlite3.connect(history.path)) as db, db:
        db.executemany(
            "INSERT INTO messages (conversation_id, parent_id, role, content, reasoning, meta, "
            "complete, created_s)"
            " VALUES (?, 0, 'user', ?, NULL, '{}', 1, 0.0)",
            [
                (conv, " ".join(words[(i * k) % 8] for k in range(1, 120)) + f" number{i}")
                for i in range(10_000)
            ],
        )
    for query in ("number4711", "lantern winter", "zebra", "4711", "x9", "number"):
        begun_s = time.thread_time()
        history.search(query)
        assert time.thread_time() - begun_s < 0.5, query
        begun_s = time.thread_time()
        history.list(query)
        assert time.thread_time() - begun_s < 0.5, query


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 30), st.text("aé日 \n", max_size=6)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("head"), st.integers(0, 30)),
        st.tuples(
            st.just("update"), st.integers(0, 30), st.text("aé日 \n", max_size=6), st.booleans()
        ),
    ),
    max_size=25,
)


@settings(max_examples=examples(40))
@given(steps=STEPS)
def test_any_history_equals_the_tree_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple]
) -> None:
    """The stored turns, the head and the search results equal those of a tree of dicts."""
    texts: dict[int, str] = {}
    parents: dict[int, int] = {}
    head = 0
    with History(tmp_path_factory.mktemp("h") / "c.db") as store:
        conv = store.create("t", "m")
        for what, at, *rest in steps:
            places = [0, *texts]
            place = places[at % len(places)]
            if what == "append":
                head = store.append(conv, "user", rest[0], parent=place)
                texts[head], parents[head] = rest[0], place
            elif what == "head":
                store.set_head(conv, place)
                head = place
            elif place and what == "update":
                store.update_partial(place, rest[0], complete=rest[1])
                texts[place] = rest[0]
            elif place:
                store.remove(place)
                above, gone = parents[place], {place}
                while more := {n for n in texts if parents[n] in gone} - gone:
                    gone |= more
                for n in gone:
                    del texts[n], parents[n]
                head = above if head in gone else head
        stored, stored_head = store.tree(conv)
        assert {m.id: (m.content, m.parent_id) for m in stored} == {
            n: (t, parents[n]) for n, t in texts.items()
        }
        assert stored_head == head
        for query in ("aaa", "é日", "a", "日aé"):
            assert {h.message_id for h in store.search(query)} == {
                n for n, t in texts.items() if query in t
            }
