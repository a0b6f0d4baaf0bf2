"""The progress of a long prompt, and the signal that an answer is complete.

The signal is for users who look at another window.
"""

from __future__ import annotations

from typing import Any

import pytest
from textual import events
from textual.drivers.headless_driver import HeadlessDriver

from localllm_tui.control.meter import AnswerMeter
from localllm_tui.control.terminal import NOTICE_SEEN, notice
from localllm_tui.screens import chat
from tui.conftest import Driver
from tui.scripted_sse import Finish, Gate, Say


def test_prefill_progress_shows_rate_elapsed_and_remaining_time() -> None:
    now_s = [0.0]
    meter = AnswerMeter(lambda: now_s[0])
    # the cache had these tokens
    assert meter.reading(2_000, 10_000) == "reading the prompt… 2,000 of 10,000 tokens"
    now_s[0] = 4.0
    assert (
        meter.reading(6_000, 10_000) == "reading the prompt… 6,000 of 10,000 tokens · 1,000 tok/s "
        "· "
        "4.0 "
        "s, "
        "4.0 "
        "s "
        "left"
    )
    now_s[0] = 8.0
    assert meter.reading(10_000, 10_000).endswith("1,000 tok/s · 8.0 s, 0.0 s left")
    assert meter.prompt_tokens == 10_000


def test_a_notice_rings_the_bell_and_a_title_adds_no_control_characters() -> None:
    said = notice("answered: rm\x1b]52;c;evil\x07\nline")
    assert said.startswith("\a\x1b]9;answered: rm")
    assert "\x1b]52" not in said
    assert said.count("\x07") == 1


@pytest.mark.parametrize(("looks_away", "seconds"), [(True, 0.0), (False, 0.0), (True, 1e9)])
def test_a_long_answer_sends_a_notice_if_the_terminal_is_not_focused(
    drive: Any, server: Any, monkeypatch: pytest.MonkeyPatch, looks_away: bool, seconds: float
) -> None:
    written: list[str] = []
    monkeypatch.setattr(HeadlessDriver, "write", lambda _, data: written.append(data))
    monkeypatch.setattr(chat, "LONG_S", seconds)
    gate = Gate()
    server.play(gate, Say(["here it is"]), Finish())

    async def play(d: Driver) -> None:
        await d.send("why is the sky blue?")
        if looks_away:
            d.app.post_message(events.AppBlur())
            await d.until(lambda: not d.app.app_focus)
        gate.opened.set()
        await d.until(lambda: "here it is" in d.screen() and not d.app.chat.answering)
        told = notice("answered: why is the sky blue?")
        assert written.count(told) == int(looks_away and not seconds)
        d.app.post_message(events.AppFocus())
        await d.until(lambda: d.app.app_focus)
        await d.until(lambda: written.count(NOTICE_SEEN) == written.count(told))

    drive(play)
