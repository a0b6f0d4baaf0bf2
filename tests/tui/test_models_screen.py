"""The models screen: plans that follow the sliders, downloads during a chat, and installed
files."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from textual.widgets import OptionList, Static

from localllm.errors import DownloadError
from localllm_tui.control.interfaces import InstalledModel, PlanList, PlanRequest
from localllm_tui.control.model_list import FirstRun, Pulls
from localllm_tui.control.model_rows import ModelRows
from localllm_tui.screens import models
from localllm_tui.screens.models import ModelsScreen
from tui.conftest import Driver
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import ScriptedServer

SIZES = [(60, 20), (80, 24), (120, 40), (160, 50)]
OURS = InstalledModel(
    "old", "Q8", 2_000_000_000, "localllm (the hub's cache)", "/cache/old.gguf", True
)
THEIRS = InstalledModel("llama", "Q4", 5_000_000_000, "Ollama", "/ollama/llama", False)


async def opened(d: Driver) -> ModelsScreen:
    if not isinstance(d.app.screen, ModelsScreen):
        await d.press("f4")
    await d.until(
        lambda: (
            isinstance(d.app.screen, ModelsScreen)
            and d.app.screen.rows.planned is not None
            and d.app.screen.rows.planned.complete
        )
    )
    screen = d.app.screen
    assert isinstance(screen, ModelsScreen)
    await d.pilot.pause()
    return screen


def service() -> ScriptedModelService:
    return ScriptedModelService(
        choice("big", 20),
        choice("mid", 8),
        choice("small", 2, installed="small"),
        disk=[OURS, THEIRS],
    )


@pytest.mark.parametrize("size", SIZES)
def test_moving_a_slider_makes_new_plans(drive: Any, size: tuple[int, int]) -> None:
    it = service()

    async def play(d: Driver) -> None:
        screen = await opened(d)
        assert "3 fit ·" in d.screen()
        assert "● SMALL" in d.screen()
        assert "why big" in d.screen()
        for _ in range(7):
            await d.press("right")  # to 131,072 tokens
        await d.until(lambda: len(screen.rows.planned.choices) == 1)
        await d.until(lambda: "1 fit, 2 too large ·" in d.screen())
        assert it.requests[-1].context == 131072
        await d.press("p")
        await d.until(lambda: it.requests[-1].purpose == "coding")

    drive(play, model_service=it, size=size)


def test_plans_are_listed_as_they_are_made_and_keys_work_meanwhile(drive: Any) -> None:
    it = service()
    it.row_gate = threading.Semaphore(0)

    async def play(d: Driver) -> None:
        await d.press("f4")
        await d.until(lambda: "planning other models" in d.screen())
        assert it.row_gate is not None
        it.row_gate.release()
        await d.until(lambda: "1 fit so far · planning the others" in d.screen())
        assert "BIG" in d.screen()
        assert "MID" not in d.screen()
        it.row_gate.release()
        await d.until(lambda: "2 fit so far" in d.screen() and "MID" in d.screen())
        await d.press("down")
        await d.until(lambda: "why mid" in d.screen())
        await d.press("f", *"mi")
        await d.until(lambda: "BIG" not in d.screen())
        await d.press("escape")
        await d.until(lambda: "BIG" in d.screen())
        for _ in range(2):
            it.row_gate.release()
        await d.until(lambda: "3 fit ·" in d.screen() and "SMALL" in d.screen())
        assert "why mid" in d.screen()  # the selection is kept

    drive(play, model_service=it)


def test_the_first_plan_is_listed_without_waiting_for_a_timer(
    drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "ARRIVED_S", 1e6)
    it = service()
    it.row_gate = threading.Semaphore(1)

    async def play(d: Driver) -> None:
        await d.press("f4")
        await d.until(lambda: "1 fit so far" in d.screen() and "BIG" in d.screen())
        assert it.row_gate is not None
        it.row_gate.release(3)
        await d.until(lambda: "3 fit ·" in d.screen())

    drive(play, model_service=it)


def test_the_bar_stays_on_the_first_row_until_the_user_moves_it(drive: Any) -> None:
    """The cursor stays on the first row until the user moves it.

    Plans arrive in any order, and better ones are inserted above those that are listed.
    """
    weak = {"points": -7.4, "basis": "tests", "rated": True}
    guess = {"points": 3.0, "basis": "a guess by size", "rated": False}
    it = ScriptedModelService(
        choice("best", 3.0, score=3.0),
        choice("second", 2.0, score=2.0, quality=guess),
        choice("third", 1.0, score=1.0, quality=weak),
    )
    it.worst_first = True
    it.row_gate = threading.Semaphore(0)

    async def play(d: Driver) -> None:
        await d.press("f4")
        for name in ("third", "second", "best"):
            assert it.row_gate is not None
            it.row_gate.release()
            await d.until(lambda name=name: f"why {name}" in d.screen())
        it.row_gate.release()
        await d.until(lambda: "3 fit ·" in d.screen())
        assert "why best" in d.screen()
        listed = d.screen()
        assert "weak" in listed
        assert "unrated" in listed
        assert "-7" not in listed
        await d.press("down", "o", "o", "o")
        assert "why best" in d.screen()

    drive(play, model_service=it, size=(120, 40))


def test_keys_explain_a_plan_and_select_another_machine(drive: Any) -> None:
    it = service()

    async def play(d: Driver) -> None:
        await opened(d)
        await d.press("w")
        await d.until(lambda: "the arithmetic of big:Q4" in d.screen())
        await d.press("escape", "m", *"rtx", "enter")
        await d.until(lambda: it.requests[-1].machine == "rtx")
        await d.until(lambda: "rtx" in d.screen())
        await d.press("enter")  # with a simulated machine, no model is pulled
        assert it.pulled == []
        await d.press("m")
        await d.pilot.press(*["backspace"] * 3, *"nonsense", "enter")
        await d.until(lambda: "no machine of that name" in d.screen())

    drive(play, model_service=it, toasts=True)


def test_a_prefill_machine_is_typed_like_the_options_of_recommend(drive: Any) -> None:
    it = service()
    joined = "spark --with mac --link 10gbe"
    it.choices = [replace(one, note="prefill on spark: pays from 256") for one in it.choices]

    async def play(d: Driver) -> None:
        await opened(d)
        await d.press("m")
        await d.pilot.press(*joined, "enter")
        await d.until(lambda: it.requests[-1].machine == joined)
        await d.until(lambda: "prefill on spark: pays from 256" in d.screen())

    drive(play, model_service=it)


def test_several_models_are_pulled_during_a_chat_and_one_is_used_afterwards(drive: Any) -> None:
    models = [
        {"id": name, "object": "model", "context_length": 1000}
        for name in ("scripted", "big", "mid")
    ]
    it = service()

    async def play(d: Driver) -> None:
        await opened(d)
        await d.press("enter", "down", "enter")
        await d.until(lambda: it.pulled == ["big:Q4", "mid:Q4"])
        await d.press("escape")
        it.go_on.release()
        await d.until(lambda: "pulling big:Q4" in d.screen().splitlines()[0])
        await d.ask("hello")
        assert "Bonjour" in d.screen()
        for _ in range(9):
            it.go_on.release()
        await d.until(lambda: "/model big" in d.screen())
        await d.until(lambda: "pulling" not in d.screen().splitlines()[0])
        await opened(d)
        await d.press("enter")
        await d.until(lambda: d.app.chat.session.model == "big")
        assert "big answers from now on" in d.screen()

    with ScriptedServer(models=models) as server:
        server.answer("Bonjour")
        drive(play, model_service=it, toasts=True, server_=server)


def test_a_stopped_or_failed_download_resumes_when_it_is_pulled_again() -> None:
    it = service()
    pulls = Pulls(it)
    first = pulls.start("big:Q4")
    pulls.stop("big:Q4")
    it.go_on.release()
    assert _ended(first)
    assert "pulling it again continues from there" in first.words()
    it.fails = DownloadError("the hub is down")
    second = pulls.start("big:Q4")
    it.go_on.release()
    assert _ended(second)
    assert "the hub is down" in second.words()
    it.fails = None
    third = pulls.start("big:Q4")
    assert pulls.start("big:Q4") is third  # it is already running
    for _ in range(4):
        it.go_on.release()
    assert _ended(third)
    assert (third.name, it.pulled) == ("big", ["big:Q4"] * 3)


def _ended(pull: Any) -> bool:
    import threading

    for thread in threading.enumerate():
        if thread.name == f"pull {pull.ref}":
            thread.join(60)
    return bool(pull.ended)


def test_installed_models_are_listed_with_their_owner_and_removed_after_two_confirmations(
    drive: Any,
) -> None:
    it = service()

    async def play(d: Driver) -> None:
        it.gate = threading.Event()
        await d.press("f4")
        await d.until(
            lambda: (
                "2 on this disk, 7.0 GB · planning other models" in d.screen()
                and "old" in d.screen()
            )
        )
        it.gate.set()
        screen = await opened(d)
        await d.press("d")
        await d.until(lambda: "2 on this disk, 7.0 GB" in d.screen())
        assert "kept by" in d.screen()
        assert "Delete removes" in d.screen()
        await d.until(lambda: "takes 1.0 of 24.0 GB: old" in d.screen())  # before it is loaded
        await d.press("delete")
        assert "Delete again removes old (2.0 GB) permanently" in d.screen()
        assert it.removed == []
        await d.press("down", "up", "delete")  # moving the cursor cancels it
        assert it.removed == []
        await d.press("delete")
        await d.until(lambda: it.removed == ["old"])
        await d.until(lambda: screen.query_one(OptionList).option_count == 1)
        # Delete would not remove them: they belong to another program
        await d.until(lambda: "Delete removes" not in d.screen())
        await d.press("delete")
        await d.until(lambda: "llama is owned by Ollama" in d.screen())
        assert "Delete again" not in d.screen()

    drive(play, model_service=it, toasts=True)


def test_the_first_run_explains_the_starter_and_a_key_pulls_a_better_model(drive: Any) -> None:
    models = [{"id": name, "object": "model"} for name in ("scripted", "mid")]
    it = service()

    async def play(d: Driver) -> None:
        await d.until(lambda: "F5  BIG Q4" in d.screen())
        assert "starter model" in d.screen()
        words = " ".join(d.screen().split())
        assert "8.0 GB (21 min at 50 Mbit/s), 15 to 25 tok/s" in words
        await d.press("f6")
        await d.until(lambda: it.pulled == ["mid:Q4"])
        await d.ask("hello")
        assert d.app.chat.session.model == "scripted"
        for _ in range(4):
            it.go_on.release()
        await d.until(lambda: d.app.chat.session.model == "mid")
        await d.ask("go on")
        assert server.requests[-1]["model"] == "mid"
        assert len(server.requests[-1]["messages"]) == 3
        assert "starter model" not in d.screen()

    with ScriptedServer(models=models) as server:
        server.answer("Bonjour")
        server.answer("Bonsoir")
        drive(play, model_service=it, first_run=True, server_=server, size=(100, 40))


def test_the_first_run_offers_plans_that_the_models_screen_made_before() -> None:
    it = service()
    known = {PlanRequest(): it.plan(PlanRequest())}
    it.requests.clear()
    first_run = FirstRun("starter", Pulls(it))
    asyncio.run(first_run.plan(known))
    assert [choice.ref for choice in first_run.best] == ["big:Q4", "mid:Q4", "small:Q4"]
    assert not it.requests


def test_the_first_offer_is_a_measured_model(drive: Any) -> None:
    guess = {"points": 90.0, "basis": "a rank guessed by size", "rated": False}
    it = ScriptedModelService(choice("huge", quality=guess), choice("known"))

    async def play(d: Driver) -> None:
        await d.until(lambda: "F5  KNOWN Q4" in d.screen())
        assert "F6  HUGE Q4" in d.screen()

    drive(play, model_service=it, first_run=True, size=(100, 40))


def test_the_first_run_shows_that_a_speed_is_assumed(drive: Any) -> None:
    it = service()
    it.guessed = True

    async def play(d: Driver) -> None:
        await d.until(lambda: "if its memory is as fast as assumed" in d.screen())
        assert "F5  BIG Q4" in d.screen()

    drive(play, model_service=it, first_run=True, size=(100, 40))


def test_the_loaded_model_is_listed_first_even_without_a_plan(drive: Any) -> None:
    it = service()
    here = replace(OURS, name="scripted", owner="the starter", path="/here.gguf")
    it.disk = [OURS, here]

    async def play(d: Driver) -> None:
        screen = await opened(d)
        await d.until(lambda: "▸ scripted" in d.screen())
        rows = [str(option.prompt) for option in screen.query_one(OptionList).options]
        assert [row.split()[0].lstrip("▸●") or row.split()[1] for row in rows] == [
            "scripted",
            "BIG",
            "MID",
            "SMALL",
        ]
        head = str(screen.query_one("#columns", Static).content)
        assert rows[0].index(" GB") + 3 == head.index("memory") + len("memory")

    drive(play, model_service=it)


def test_a_chat_after_the_first_run_does_not_mention_the_starter(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("f5")
        assert "starter" not in d.screen()

    drive(play, model_service=service())


def test_columns_are_not_cut_and_zero_has_no_minus_sign() -> None:
    theirs = replace(THEIRS, name="n" * 60, owner="a Python package")
    plan = choice("a", 1, quality={"points": -0.4, "basis": "ours"})
    rows = ModelRows(Pulls(service()), planned=PlanList("", (plan,)), disk=[theirs])
    (planned,) = rows.rows(100, ())
    assert " 0 " in planned.line
    assert "-0" not in planned.line
    rows.shows_disk = True
    for width in (75, 115):
        assert rows.rows(width, ())[0].line.endswith("a Python package")
    assert rows.head(35).endswith("size")
    assert rows.rows(35, ())[0].line.endswith(" GB")


def test_words_filter_the_list_and_slow_models_are_listed_last(drive: Any) -> None:
    class Slow(ScriptedModelService):
        def plan(self, request: Any, *told: Any) -> Any:
            planned = super().plan(request, *told)
            return replace(planned, choices=planned.choices[:2], too_slow=planned.choices[2:])

    it = Slow(
        choice("big", 20),
        choice("mid", 8),
        choice("snail", 2),
        choice("scripted", 1, installed="scripted"),
    )

    async def play(d: Driver) -> None:
        screen = await opened(d)
        assert "2 fit, 2 answer too slowly" in d.screen()
        rows = [str(option.prompt) for option in screen.query_one(OptionList).options]
        assert [row.split()[0].lstrip("▸") or row.split()[1] for row in rows] == [
            "SCRIPTED",
            "BIG",
            "MID",
            "SNAIL",
        ]
        assert rows[0].startswith("▸")
        await d.press("f", *"m")
        await d.until(lambda: "BIG" not in d.screen() and "MID" in d.screen())
        await d.press(*"id", "enter")
        assert screen.query_one(OptionList).has_focus
        await d.press("f", "ctrl+u", *"snail", "enter", "enter")
        await d.until(lambda: it.pulled == ["snail:Q4"])
        await d.press("escape")
        await d.until(lambda: "BIG" in d.screen())
        assert d.app.screen is screen
        for _ in range(4):
            it.go_on.release()

    drive(play, model_service=it, size=(100, 30))


def test_the_order_can_be_changed_and_the_loaded_model_stays_first(drive: Any) -> None:
    it = ScriptedModelService(
        choice("big", 20, decode_tok_s={"value": 5.0, "low": 4.0, "high": 6.0}),
        choice("mid", 8),
        choice("small", 2, decode_tok_s={"value": 90.0, "low": 80.0, "high": 99.0}),
        choice("here", 4, installed="scripted"),
    )

    async def play(d: Driver) -> None:
        def order() -> list[str]:
            names = ("BIG", "MID", "SMALL", "HERE")
            found = {name: d.screen().find(f" {name} ") for name in names}
            return sorted(
                (name for name in names if found[name] >= 0), key=lambda name: found[name]
            )

        await opened(d)
        assert order() == ["HERE", "BIG", "MID", "SMALL"]
        await d.press("o")
        await d.until(lambda: order() == ["HERE", "SMALL", "MID", "BIG"])
        assert "by speed" in d.screen()
        await d.press("o")
        await d.until(lambda: "by memory" in d.screen())
        assert order() == ["HERE", "SMALL", "MID", "BIG"]
        # The earlier plans are shown at once while they are computed again.
        it.gate = threading.Event()
        await d.press("escape", "f4")
        await d.until(lambda: isinstance(d.app.screen, ModelsScreen) and "4 fit ·" in d.screen())
        assert order() == ["HERE", "BIG", "MID", "SMALL"]
        it.gate.set()

    drive(play, model_service=it)


def test_a_cut_file_is_named_and_not_listed(drive: Any) -> None:
    it = service()
    it.disk.append(replace(THEIRS, name="half", path="/ollama/half", fault="it may be cut short"))

    async def play(d: Driver) -> None:
        screen = await opened(d)
        await d.press("d")
        await d.until(lambda: "cut short, so not listed: half" in d.screen())
        assert [model.name for model in screen.rows.disk or ()] == ["old", "llama"]

    drive(play, model_service=it, size=(120, 40))
