"""The chat with long texts: time of a key on each screen and interface, up to 1 MB (bar: 0.2 s).

python -m benchmarks.long_texts [--most 1000000] [--kinds words letters ...] [--sizes 80x24 ...]
    [--screens conversation "models (F4)" ...] [--processor]

A conversation has a question, an answer and a tool call with one long text each. The text doubles
until it has --most characters. A few keys are pressed on each screen. The time of a key is the
longest time in which the chat's event loop did not run. The times of the last two sizes show
whether the work is linear. On a busy machine, --processor counts the processor time of the loop
instead. All kinds take about ten minutes of processor time, so each screen is named as it begins.

"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from benchmarks.chat import longest_s
from benchmarks.processes import empty_home
from localllm.bench.stream import free_port
from localllm.conversation.history import History, StoredMessage
from localllm_tui.app import ChatApp
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.inline.chat import InlineAnswer
from localllm_tui.line_chat import WrappedLines

Clock: TypeAlias = Callable[[], float]
BAR_S = 0.2
_FIRST_CHARS = 125_000
KINDS = {
    "words": "some words of a text ",
    "letters": "x",
    "japanese": "日本語",
    "links": "[a](",
    "items": "- an item\n",
    "quotes": "> a line\n",
    "table": "|a|b|\n",
    "formulas": "$$\n\\frac{a}{b}\n$$\n\n",
    "diagrams": "```mermaid\ngraph TD\nA --> B\n```\n\n",
    "code": "```py\nx = 1\n```\n",
    "stars": "*a",
}
# The beginning of a kind of text.
_HEADS = {"table": "|a|b|\n|-|-|\n"}
# The keys of each screen. The first one opens it.
SCREENS = {
    "conversation": ("pageup", "pagedown", "h"),
    "a turn selected (F2)": ("f2", "t", "pageup", "t", "up", "down", "escape"),
    "cost of a token (F3)": ("f3", "pageup", "f3"),
    "models (F4)": ("f4", "down", "escape"),
    "palette": ("ctrl+p", "c", "escape"),
    "earlier questions (Ctrl+R)": ("ctrl+r", "w", "backspace", "escape"),
    "conversations (Ctrl+O)": ("ctrl+o", "w", "backspace", "escape"),
    "find (Ctrl+F)": ("ctrl+f", "w", "backspace", "escape"),
    "help (F1)": ("f1", "down", "escape"),
}


def long_text(kind: str, n_chars: int) -> str:
    """Return `n_chars` characters of a kind."""
    piece = KINDS[kind]
    head = _HEADS.get(kind, "")
    return (head + piece * (n_chars // len(piece) + 1))[:n_chars]


async def key_times_s(
    folder: Path, text: str, size: tuple[int, int], clock: Clock, screens: Sequence[str]
) -> dict[str, float]:
    """Return the longest time of a key on each of `screens`."""
    found: dict[str, float] = {}
    tool = {"name": "read", "arguments": text, "result": text, "allowed": True}
    turns = [
        StoredMessage(1, "user", text),
        StoredMessage(2, "assistant", text, text, {"tools": [tool]}, parent_id=1),
    ]
    with History(folder / "conversations.db") as history:
        conversation = history.create("long", "none")
        history.add(conversation, turns)
        async with ChatClient(f"http://127.0.0.1:{free_port()}/v1") as client:
            options = ChatOptions(client, history, "none", resume=conversation)
            app = ChatApp(options, lambda _: True)
            async with app.run_test(size=size) as pilot:
                await pilot.pause()
                for screen in screens:
                    _report(screen)
                    found[screen] = await _longest_key_s(pilot, SCREENS[screen], clock)
        history.delete(conversation)
    return found


def _report(words: str) -> None:
    """Show what is measured, in a line that the next one replaces."""
    print(f"\r\x1b[K  {words}", end="", file=sys.stderr, flush=True)


async def _longest_key_s(pilot: Any, keys: tuple[str, ...], clock: Clock) -> float:
    held_s = 0.0
    for key in keys:
        pressed = asyncio.create_task(pilot.press(key))
        held_s = max(held_s, await longest_s(pressed, clock))
    return held_s


class _NoPage:
    """A page that discards the output of an inline answer."""

    columns = 100
    tail = ""

    def write(self, text: str) -> None:
        """Write nothing."""

    def changed(self) -> None:
        """Draw nothing."""


def interface_times_s(text: str, clock: Clock) -> Iterator[tuple[str, float]]:
    """Yield the longest time of a piece of 100 characters in the line interfaces, for the last 50
    pieces."""
    page: Any = _NoPage()
    inline = InlineAnswer(page, Console(file=io.StringIO()))
    lines = WrappedLines(100)
    takes: dict[str, Callable[[str], object]] = {
        "--inline, an answer": inline.feed,
        "--plain, an answer": lines.add,
    }
    for name, take in takes.items():
        _report(name)
        take(text[:-5_000])
        taken_s = 0.0
        for at in range(len(text) - 5_000, len(text), 100):
            begun_s = clock()
            take(text[at : at + 100])
            taken_s = max(taken_s, clock() - begun_s)
        yield name, taken_s


def main() -> None:
    """Measure, print the times above the bar and the longest one of each screen, and exit with 1 if
    a key missed the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sizes", nargs="*", default=["80x24"])
    parser.add_argument("--screens", nargs="*", default=list(SCREENS), choices=list(SCREENS))
    parser.add_argument("--processor", action="store_true")
    options = parser.parse_args()
    clock = time.thread_time if options.processor else time.perf_counter
    missed = False
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with empty_home() as folder:
        for kind in options.kinds:
            for words in options.sizes:
                columns, _, rows = words.partition("x")
                n_chars = min(_FIRST_CHARS, options.most)
                while n_chars <= options.most:
                    gc.collect()
                    gc.freeze()  # as the command does before the screen starts
                    text = long_text(kind, n_chars)
                    size = (int(columns), int(rows))
                    begun_s = time.perf_counter()
                    found = key_times_s(folder, text, size, clock, options.screens)
                    times = asyncio.run(found)
                    if len(options.screens) == len(SCREENS):
                        times |= dict(interface_times_s(text, clock))
                    slow = {name: took_s for name, took_s in times.items() if took_s > BAR_S}
                    missed = missed or bool(slow)
                    longest = max(times, key=times.__getitem__)
                    _report("")
                    print(
                        f"{kind:10} {words} {n_chars:>9,}: {times[longest]:.3f} s "
                        f"({longest}), all in {time.perf_counter() - begun_s:.0f} s",
                        flush=True,
                    )
                    for name, took_s in slow.items():
                        print(f"    above the bar: {took_s:.2f} s {name}", flush=True)
                    n_chars *= 2
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
