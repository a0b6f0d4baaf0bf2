"""The glass panel: bytes per token, memory bandwidth and the answer's time.

They agree with the server's own figures.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.chat.own_server import OwnEngine
from localllm_tui.control.client import ChatClient
from localllm_tui.control.physics import (
    PANEL_WIDTH,
    AnswerSpeed,
    ModelPhysics,
    panel_lines,
)
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerTimings,
    AnswerUsage,
)
from localllm_tui.widgets.figures import GlassPanel
from support.own_server import background_server
from tui.conftest import Driver
from tui.scripted_sse import Finish, Gate, Say, ScriptedServer

PHYSICS = {
    "device": "A laptop", "bandwidth_gbps": 34.0, "tflops": 1.0, "quant": "Q4_K_M",
    "kv_type": "f16", "n_batch": 256,
    "weights": {"dense_bytes": 1_900_000_000, "routed_bytes": 310_000_000},
    # Half of the layers have a window of 1,000 tokens.
    "kv_read_bytes": [[0, 0], [1000, 60_000_000], [9000, 300_000_000]],
    "flops_per_token": 8e9, "decode_tok_s": {"value": 11.5, "low": 10.0, "high": 13.0,
    "basis": "table"},
    "prefill_tok_s": {"value": 60.0, "low": 40.0, "high": 90.0, "basis": "table"},
    "memory": {"total_bytes": 5e9, "limit_bytes": 16e9, "weights_bytes": 4e9, "kv_bytes": 6e8},
}  # fmt: skip
TIMINGS = {
    "queued_ms": 10.0, "prompt_ms": 4000.0, "prompt_n": 200, "predicted_ms": 8000.0,
    "predicted_n": 101,
    "predicted_steps": 96, "draft_n": 12, "draft_n_accepted": 4,
}  # fmt: skip
MODELS = [{"id": "scripted", "object": "model", "context_length": 9000, "physics": PHYSICS}]


def known() -> ModelPhysics:
    found = ModelPhysics.of(PHYSICS)
    assert found is not None
    return found


def test_kv_size_is_interpolated_between_the_reported_points() -> None:
    physics = known()
    assert [physics.kv_bytes(d) for d in (0, 500, 1000, 5000, 9000, 20000)] == [
        0,
        3e7,
        6e7,
        1.8e8,
        3e8,
        3e8,
    ]
    assert physics.token_bytes(1000) == 2_270_000_000
    assert physics.limit_tok_s(1000) == pytest.approx(34e9 / 2.27e9)


def test_bandwidth_is_the_bytes_of_a_step_divided_by_its_time() -> None:
    speed = AnswerSpeed(AnswerUsage(950, 101, 750), AnswerTimings(0.01, 4.0, 200, 8.0, 96, 12, 4))
    physics = known()
    achieved = speed.achieved_gbps(physics)
    assert achieved == pytest.approx(physics.token_bytes(950 + 50.5) * 96 / 8 / 1e9)
    assert speed.tok_s == pytest.approx(12.5)
    assert "BANDWIDTH 27 of 34 GB/s: 80%" in panel_lines(physics, speed)


@pytest.mark.parametrize(
    ("basis", "tok_s", "said"),
    [
        ("assumed", 5.0, "the plan's bandwidth is assumed"),
        ("assumed", 20.0, "the plan's bandwidth is assumed"),
        ("table", 5.0, ""),
        ("assumed", 11.0, ""),
    ],
)
def test_an_answer_outside_its_planned_range_shows_the_known_reason(
    basis: str, tok_s: float, said: str
) -> None:
    """An answer outside its plan's range shows the reason, if it is known.

    The plan predicts 10 to 13 tokens a second.
    """
    physics = ModelPhysics.of({**PHYSICS, "bandwidth_basis": basis})
    lines = panel_lines(physics, AnswerSpeed(live=tok_s))
    after = lines[[line.startswith("  planned") for line in lines].index(True) + 1].strip()
    assert after.startswith(said) if said else after == ""


@pytest.mark.parametrize(
    "said", [{}, {**PHYSICS, "weights": 3}, {**PHYSICS, "kv_read_bytes": [[1]]}]
)
def test_a_server_that_reports_no_physics_shows_no_guessed_values(said: dict[str, Any]) -> None:
    assert ModelPhysics.of(said) is None
    assert "does not report" in panel_lines(None, None)[0]


@pytest.mark.parametrize(
    "speed",
    [
        None,
        AnswerSpeed(),
        AnswerSpeed(live=3.0, coming=True),
        AnswerSpeed(AnswerUsage(10, 1), AnswerTimings()),
    ],
)
def test_unmeasured_values_are_not_shown_as_measured(speed: AnswerSpeed | None) -> None:
    text = "\n".join(panel_lines(known(), speed))
    assert "EACH TOKEN READS" in text
    assert ("as it arrives" in text) == (speed is not None and speed.live is not None)
    assert all(len(line) <= PANEL_WIDTH for line in text.splitlines())


@pytest.fixture
def server() -> Any:
    with ScriptedServer(models=MODELS) as running:
        yield running


@pytest.mark.parametrize(
    ("size", "beside"), [((120, 40), True), ((80, 24), False), ((60, 20), False)]
)
def test_a_key_shows_the_panel_next_to_or_above_the_conversation(
    drive: Any, server: ScriptedServer, size: tuple[int, int], beside: bool
) -> None:
    server.play(
        Say(["four ", "words ", "of ", "answer"]), Finish(usage=(950, 101, 750), timings=TIMINGS)
    )

    async def play(d: Driver) -> None:
        await d.ask("how fast?")
        assert "EACH TOKEN READS" not in d.screen()
        await d.press("f3")
        await d.until(lambda: "EACH TOKEN READS 2.27 GB" in d.screen())
        screen = d.screen()
        assert ("four words of answer" in screen) == beside or not beside
        assert "BANDWIDTH 27 of 34 GB/s: 80%" in screen
        assert all(len(line) <= size[0] for line in screen.splitlines())
        if beside:
            lines = [
                line.rstrip() for line in panel_lines(d.app.chat.listed.physics, d.app.chat.speed)
            ]
            assert [line for line in lines if line not in screen] == []  # no line is wrapped
            assert "PROMPT 750 of 950 from cache" in screen
            assert "drafts: 4 of 12 accepted" in screen
            assert "planned      11.5  (10 to 13)" in screen
            assert "  the rest at 50 tok/s" in screen
            bar = next(
                line for line in screen.splitlines() if line.count("█") + line.count("░") >= 35
            )
            assert bar.count("█") == pytest.approx(0.8 * 36, abs=1)  # the bandwidth as one bar
        await d.press("f3")
        await d.until(lambda: "EACH TOKEN READS" not in d.screen())

    drive(play, size=size)


@pytest.mark.parametrize("says", [True, False])
def test_the_panel_shows_a_power_limit_that_was_set(
    drive: Any, server: ScriptedServer, says: bool
) -> None:
    server.models = [{**MODELS[0], "physics": {**PHYSICS, "power": 0.6}}] if says else MODELS
    server.play(
        Say(["four ", "words ", "of ", "answer"]), Finish(usage=(950, 101, 750), timings=TIMINGS)
    )

    async def play(d: Driver) -> None:
        await d.press("f3")
        await d.ask("how much?")
        await d.until(lambda: "THIS ANSWER" in d.screen() and "planned" in d.screen())
        assert ("power         60% of the time" in d.screen()) is says

    drive(play, size=(120, 40))


def test_the_status_line_adapts_when_its_width_changes(drive: Any, server: ScriptedServer) -> None:
    """The status line adapts whenever its width changes, without a call to it.

    An update that came a moment too early once left it cut off.
    """
    server.play(
        Say(["four ", "words ", "of ", "answer"]), Finish(usage=(950, 101, 750), timings=TIMINGS)
    )

    async def play(d: Driver) -> None:
        await d.ask("how fast?")
        await d.until(lambda: "context 1,051/" in d.screen() and "cached tokens 750" in d.screen())
        d.app.screen.query_one(GlassPanel).toggle_class("wanted")
        await d.until(lambda: "ctx 1,051/" in d.screen() and "cached 750" in d.screen())
        d.app.screen.query_one(GlassPanel).toggle_class("wanted")
        await d.until(lambda: "cached tokens 750" in d.screen())
        assert "context 1,051/" in d.screen()

    drive(play, size=(120, 40))


def test_the_panel_of_a_stopped_answer_waits_for_no_more_values(
    drive: Any, server: ScriptedServer
) -> None:
    gate = Gate()
    server.play(Say(["one ", "two ", "three "]), gate, Say(["four"]), Finish())

    async def play(d: Driver) -> None:
        await d.send("how fast?")
        await d.press("f3")
        await d.until(lambda: "as it arrives" in d.screen() and "known when" in d.screen())
        assert "each token reads" not in d.screen()  # the panel shows it
        await d.press("escape")
        await d.until(lambda: "as it arrived" in d.screen())
        assert "known when" not in d.screen()
        await d.press("f3")
        await d.until(lambda: "each token reads 2.2" in d.screen())

    drive(play, size=(120, 40))
    gate.opened.set()


def test_while_a_model_is_loaded_no_other_figures_are_shown() -> None:
    text = "\n".join(panel_lines(known(), AnswerSpeed(live=3.0), loading="loading big 40%"))
    assert text.startswith("Still loading big 40%")
    assert "READS" not in text


def test_no_final_time_is_shown_before_the_first_token() -> None:
    text = "\n".join(panel_lines(known(), AnswerSpeed(AnswerUsage(10, 0), coming=True)))
    assert "known when the answer is complete" in text


def test_a_narrower_terminal_moves_the_panel_above_the_conversation(
    drive: Any, server: ScriptedServer
) -> None:
    async def play(d: Driver) -> None:
        await d.press("f3")
        await d.until(lambda: "EACH TOKEN" in d.screen())
        await d.pilot.resize_terminal(80, 24)
        panel, text = d.app.screen.query_one(GlassPanel), d.app.page.transcript
        await d.until(lambda: panel.region.bottom == text.region.y and text.region.width == 80)
        assert "EACH TOKEN" in d.screen()
        assert "Enter sends" in d.screen()
        assert "TIME" in d.screen()  # in a second column
        await d.pilot.resize_terminal(40, 20)
        await d.until(lambda: panel.max_scroll_y > 0)
        panel.scroll_end(animate=False)  # like the wheel
        await d.until(lambda: "TIME" in d.screen())
        await d.press("f3")
        await d.until(lambda: "EACH TOKEN" not in d.screen())

    drive(play, size=(120, 40))


def test_the_panel_of_a_real_model_shows_the_measured_values(smollm2: Path) -> None:
    async def main(engine: OwnEngine) -> None:
        async with ChatClient(
            engine.base_url, engine.api_key, sampling={"temperature": 0, "max_tokens": 24}
        ) as client:
            events = [
                e
                async for e in client.stream(
                    engine.model, [{"role": "user", "content": "Count to twenty."}]
                )
            ]
            (listed,) = [m for m in await client.models() if m.name == engine.model]
        done = events[-1]
        assert isinstance(done, AnswerDone)
        assert done.timings is not None
        assert done.usage is not None
        physics = listed.physics
        assert physics is not None
        # SmolLM2-135M: 30 layers, 3 KV heads of 64, keys and values in 16 bits. Almost all of its
        # 98 MB file is read.
        assert physics.kv_bytes(100) == pytest.approx(100 * 30 * 2 * 3 * 64 * 2, rel=0.01)
        assert 75e6 < physics.token_bytes(0) < 115e6
        took = done.timings
        assert 1 <= took.steps <= 23
        speed = AnswerSpeed(done.usage, took)
        measured = physics.token_bytes(speed.depth) / (took.decode_s / took.steps) / 1e9
        assert speed.achieved_gbps(physics) == pytest.approx(measured, rel=0.1)

    with background_server(str(smollm2), 512) as engine:
        asyncio.run(main(engine))
