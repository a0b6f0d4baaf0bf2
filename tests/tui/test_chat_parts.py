"""Small parts of the chat: numbers as text, commands, files to attach, and text for terminals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from localllm.errors import ContextLengthError, ServerUnreachableError, UsageError
from localllm_tui.control import commands, formatting
from localllm_tui.control.answering import AnswerDisplay, AnswerStream
from localllm_tui.control.attachments import check_fits_context, read_text
from localllm_tui.control.commands import command_section, section_text
from localllm_tui.control.formatting import ago, bar, elide, how_many
from localllm_tui.control.meter import AnswerMeter, status_text
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerUsage,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolResult,
)
from localllm_tui.control.terminal import printable
from localllm_tui.control.wording import next_steps
from support.pdfs import needs_pdf, pdf


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Unseen(AnswerDisplay):
    """A display that shows nothing."""

    def feed(self, text: str = "", reasoning: str = "") -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def end(self, note: str) -> None:
        pass


def test_speed_is_counted_from_the_first_token_to_the_last() -> None:
    clock = Clock()
    meter = AnswerMeter(clock)
    clock.now += 2.0
    meter.delta()
    assert (meter.ttft_s, meter.tok_s) == (2.0, None)
    clock.now += 1.0
    meter.delta()
    assert meter.tok_s == 1.0
    # deltas may hold several tokens, so the server's count is used
    meter.usage = AnswerUsage(prompt=50, completion=11, cached=40)
    assert meter.tok_s == 10.0
    assert meter.used == 61
    assert meter.meta() == {
        "ttft_s": 2.0,
        "tok_s": 10.0,
        "prompt_tokens": 50,
        "completion_tokens": 11,
        "cached_tokens": 40,
    }


def test_tokens_that_arrive_together_have_no_speed() -> None:
    clock = Clock()
    meter = AnswerMeter(clock)
    clock.now += 0.2
    meter.delta()
    clock.now += 0.004
    meter.delta()
    meter.usage = AnswerUsage(prompt=182, completion=20)
    assert meter.tok_s is None
    assert "tok_s" not in meter.meta()


def test_a_speed_leaves_out_the_time_of_a_tool() -> None:
    clock = Clock()
    answer = AnswerStream()
    answer.meter = AnswerMeter(clock)

    async def stream() -> AsyncGenerator[StreamEvent, None]:
        yield TextDelta("Let me ")
        clock.now += 0.5
        yield TextDelta("look. ")
        clock.now += 20.0
        yield ToolResult(ToolCall("c1", "slow", "{}"), "done", allowed=True)
        for n in range(11):
            clock.now += 0.2
            yield TextDelta(f"{n} ")
            assert answer.meter.tok_s == (pytest.approx(5.0) if n else None)
        yield AnswerDone("stop", AnswerUsage(prompt=50, completion=21))

    asyncio.run(answer.run(stream(), Unseen()))
    assert answer.meter.tok_s == pytest.approx(10.0)
    assert answer.meter.ttft_s == 0.0


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 40))
def test_the_bar_shows_the_share_and_is_empty_or_full_only_at_the_ends(
    used: int, n_ctx: int, cells: int
) -> None:
    shown = bar(used, n_ctx, cells)
    assert len(shown) == cells
    filled = shown.rstrip("░")
    eighths = sum("▏▎▍▌▋▊▉█".index(c) + 1 for c in filled)
    assert set(filled[:-1]) <= {"█"}
    assert abs(eighths - min(used / n_ctx, 1) * 8 * cells) <= 1
    assert (eighths == 0) == (used == 0)
    assert (eighths == 8 * cells) == (used >= n_ctx)


seconds = st.floats(0, 1e5, allow_nan=False)
known = {
    "tok_s": seconds,
    "ttft_s": seconds,
    "cached_tokens": st.integers(0, 10**7),
}
numbers = st.fixed_dictionaries(
    {
        "model": st.text(min_size=1, max_size=60),
        "used": st.integers(0, 10**7),
        "n_ctx": st.none() | st.integers(1, 10**7),
        "meta": st.fixed_dictionaries({}, optional=known),
    }
)


@given(numbers, st.integers(10, 200))
def test_the_status_line_always_fits(n: dict[str, Any], width: int) -> None:
    assert cell_len(status_text(width, **n)) <= width


def test_the_status_line_at_80_and_160_columns() -> None:
    meta = {"tok_s": 61.25, "ttft_s": 0.31, "cached_tokens": 512}
    n = ("smollm2-135m-instruct", 1530, 2048)
    assert status_text(156, *n, meta) == (
        "smollm2-135m-instruct  61.2 tok/s  context 1,530/2,048 ███████▍░░ 75%  first token 0.31 "
        "s  cached tokens 512"
    )
    # Figures replace a bar. Part of a name would be useless, so the whole name stays.
    assert status_text(76, *n, meta) == (
        "smollm2-135m-instruct  61.2 tok/s  ctx 1,530/2,048  TTFT 0.31 s  cached 512"
    )
    assert "█████▉░░" in status_text(76, *n, {"tok_s": 61.25, "ttft_s": 0.31})


@given(st.text(), st.integers(1, 30))
def test_elide_cuts_to_cells(text: str, cells: int) -> None:
    assert cell_len(elide(text, cells)) <= cells
    if cell_len(text) <= cells:
        assert elide(text, cells) == text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (59, "just now"),
        (60, "1 min ago"),
        (7200, "2 h ago"),
        (3 * 86400, "3 days ago"),
    ],
)
def test_times_are_shown_relative_to_now(seconds: float, words: str) -> None:
    assert ago(seconds) == words


def test_counts_of_one_have_a_singular_noun() -> None:
    assert [how_many(n, "message") for n in (0, 1, 2)] == ["0 messages", "1 message", "2 messages"]


@pytest.mark.parametrize(
    ("typed", "parsed"),
    [
        ("/new", ("new", "")),
        ("  /save my chat.md ", ("save", "my chat.md")),
        ("/save! x", ("save!", "x")),
        ("/exit", ("quit", "")),
        ("/system one\ntwo", ("system", "one\ntwo")),
        ("/nonsense", ("nonsense", "")),
        ("/etc/hosts, what is it?", None),
        ("//new", None),
        ("what is /new?", None),
        ("/ ", None),
        ("", None),
    ],
)
def test_typed_text_is_parsed_as_a_command_or_a_question(
    typed: str, parsed: tuple[str, str] | None
) -> None:
    assert commands.parse(typed) == parsed


def test_two_slashes_at_the_start_send_one() -> None:
    assert commands.question("//new is a word") == "/new is a word"


def test_every_command_is_explained_under_one_name() -> None:
    shown = section_text(command_section())
    names = [name for c in commands.COMMANDS for name in (c.name, *c.aliases)]
    assert len(set(names)) == len(names)
    for command in commands.COMMANDS:
        assert any(
            line.startswith(f"  {command.usage} ") and line.endswith(command.help)
            for line in shown.splitlines()
        )
        for name in (command.name, *command.aliases):
            assert commands.parse(f"/{name} x") == (command.name, "x")
    assert [c.name for c in commands.offered("/s")[:4]] == [
        "save",
        "save-prompt",
        "system",
        "sampling",
    ]


def test_a_text_file_is_read_as_utf_8_without_its_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfgr\xc3\xbc\xc3\x9fe")
    assert read_text(file) == ("a.txt", "grüße")


@needs_pdf()
def test_a_pdf_is_attached_as_its_text(tmp_path: Path) -> None:
    (tmp_path / "two.pdf").write_bytes(pdf(["first words", "", "last words"]))
    assert read_text(tmp_path / "two.pdf") == (
        "two.pdf",
        "first words\n\n[page 2 is a picture]\n\nlast words",
    )


@needs_pdf()
@pytest.mark.parametrize(
    ("pages", "cut", "why"), [([""], None, "its pages are pictures"), (["words"], 60, "damaged")]
)
def test_a_pdf_without_text_is_refused_with_the_reason(
    tmp_path: Path, pages: list[str], cut: int | None, why: str
) -> None:
    (tmp_path / "bad.pdf").write_bytes(pdf(pages)[:cut])
    with pytest.raises(UsageError, match=why):
        read_text(tmp_path / "bad.pdf")


def test_a_pdf_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.conversation.pdf.installed", lambda: False)
    (tmp_path / "some.pdf").write_bytes(b"%PDF-1.7")
    with pytest.raises(UsageError) as refusal:
        read_text(tmp_path / "some.pdf")
    assert "localllm[pdf]" in refusal.value.hint


def test_a_file_that_is_not_text_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (tmp_path / "zero.bin").write_bytes(b"a\0b")
    for name, why in (
        ("latin.txt", "not UTF-8"),
        ("zero.bin", "binary"),
        ("none.txt", "No such file"),
        (".", "directory"),
    ):
        with pytest.raises(UsageError, match=why):
            read_text(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "formats"),
    [
        ("cut.png", b"\x89PN", "PNG, JPEG, WebP or GIF"),
        ("empty.JPG", b"", "PNG, JPEG, WebP or GIF"),
        ("phone.heic", b"\0\0\0\x24ftypheic", "PNG, JPEG, WebP or GIF"),
        ("pointer.webp", b"version https://git-lfs.github.com/spec/v1\n", "PNG, JPEG, WebP or GIF"),
        ("empty.wav", b"", "WAV, MP3 or FLAC"),
        ("memo.m4a", b"\0\0\0\x1cftypM4A ", "WAV, MP3 or FLAC"),
    ],
)
def test_an_unreadable_image_or_sound_is_refused_with_the_readable_formats(
    name: str, content: bytes, formats: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name} can't be attached: .* {formats}"):
        read_text(tmp_path / name)


def test_attached_files_must_fit_the_context_together() -> None:
    check_fits_context([("a", "x" * 400), ("b", "x" * 400)], 100)
    check_fits_context([("a", "x" * 10**6)], None)
    with pytest.raises(ContextLengthError, match="a, b: 801 bytes"):
        check_fits_context([("a", "x" * 400), ("b", "x" * 401)], 100)


@given(st.text())
def test_printable_keeps_the_text_and_drops_control_characters(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    assert printable(shown) == shown
    assert [c for c in text if ord(c) >= 160] == [c for c in shown if ord(c) >= 160]


def test_shortening_a_long_text_measures_a_few_times_its_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shortening measures the text only a few times.

    One measurement for each removed character would take quadratic time.
    """
    measured: list[int] = []

    def counted(text: str) -> int:
        measured.append(len(text))
        return cell_len(text)

    monkeypatch.setattr(formatting, "cell_len", counted)
    assert elide("word " * 200_000, 60).endswith("…")
    assert len(measured) < 20
    assert sum(measured[1:]) < 5_000


def test_a_broken_answer_can_be_continued() -> None:
    error = ServerUnreachableError("the connection to the server broke")
    assert "/more continues it" in next_steps(error, kept=True, without_history=True)
    assert "/more" not in next_steps(error, kept=False, without_history=True)
