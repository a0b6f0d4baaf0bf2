"""What the chat is held to beside its frames and echoes: the first paint, opening 2,000 turns, and keys while models are planned.

python -m benchmarks.chat_bars [--starts 5]     # `chat_frames` and `typing_echo` measure the other two bars

A start is timed in a pseudo terminal until the input's hints are drawn, with the starter model behind. While planning
runs, what a key would wait is the longest time in which the chat's loop did not come round. The load is told beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import empty_home
from benchmarks.typing_echo import Terminal
from localllm.bench.stream import free_port
from localllm.cli.chat.planning import PlanningProcess
from localllm.conversation.history import History, StoredMessage
from localllm_tui.app import ChatApp
from localllm_tui.control.chat import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import PlanRequest

FIRST_PAINT_S, OPEN_S, HELD_S = 0.6, 1.0, 0.05
TURNS = 2_000
_LOOK_S, _IDLE_S = 0.002, 3.0


def first_paint_s(folder: Path) -> float:
    """From the start of the program to its hints on the screen."""
    begun_s = time.perf_counter()
    terminal = Terminal([sys.executable, "-m", "localllm", "chat", "-m", "smollm2-135m-instruct"], folder)
    try:
        return terminal.wait_for("F1 help") - begun_s
    finally:
        terminal.close()


async def open_and_plan(folder: Path) -> tuple[float, float, float]:
    """(seconds until a conversation of 2,000 turns is on screen, the longest time without the loop while models are planned, and
    while nothing is done)."""
    desk = PlanningProcess(offline=True)
    with History(folder / "conversations.db") as history:
        conv = history.create("long", "none")
        roles = ("assistant", "user")
        history.add(
            conv,
            [
                StoredMessage(i, roles[i % 2], f"turn {i} " + "words " * 40, parent_id=i - 1)
                for i in range(1, TURNS + 1)
            ],
        )
        async with ChatClient(f"http://127.0.0.1:{free_port()}/v1") as client:
            app = ChatApp(ChatOptions(client, history, "none", model_service=desk), lambda _: True)
            async with app.run_test(size=(120, 40)) as pilot:
                await pilot.pause()
                begun_s = time.perf_counter()
                await app.chat.run_command("continue", "")
                await pilot.pause()
                opened_s = time.perf_counter() - begun_s
                planning = asyncio.create_task(asyncio.to_thread(desk.plan, PlanRequest()))
                held_s = await longest_s(planning)
                idle_s = await longest_s(asyncio.create_task(asyncio.sleep(_IDLE_S)))
    desk.close()
    return opened_s, held_s, idle_s


async def longest_s(beside: asyncio.Task[Any]) -> float:
    """The longest time in which the loop did not come round while `beside` was done."""
    longest, last_s = 0.0, time.perf_counter()
    while not beside.done():
        await asyncio.sleep(_LOOK_S)
        now_s = time.perf_counter()
        longest, last_s = max(longest, now_s - last_s - _LOOK_S), now_s
    await beside
    return longest


def main() -> None:
    """Measure, print, and exit with 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    given = parser.parse_args()
    with empty_home() as folder:
        starts = sorted(first_paint_s(folder) for _ in range(given.starts))
        opened_s, held_s, idle_s = asyncio.run(open_and_plan(folder))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(f"first paint: median {starts[len(starts) // 2]:.2f} s, best {starts[0]:.2f} s (bar {FIRST_PAINT_S} s)")
    print(f"{TURNS:,} turns open: {opened_s:.2f} s (bar {OPEN_S} s)")
    print(
        f"planning holds the loop at most {held_s * 1e3:.0f} ms (bar {HELD_S * 1e3:.0f} ms), other programs {idle_s * 1e3:.0f} ms"
    )
    sys.exit(int(starts[len(starts) // 2] > FIRST_PAINT_S or opened_s > OPEN_S or held_s > HELD_S))


if __name__ == "__main__":
    main()
