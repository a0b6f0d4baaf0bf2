"""Mermaid's flowcharts and sequence diagrams are drawn if they fit; otherwise the source is
shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.markdown import MarkdownRows
from localllm_tui.widgets.mermaid import diagram_rows
from localllm_tui.widgets.text import GrowingText
from tui.conftest import Driver
from tui.scripted_sse import Finish, Say, ScriptedServer

CHART = """flowchart TD
    A[Start] --> B{Is it working?}
    B -->|Yes| C(Great!)
    B -- No --> D[Debug]
    D --> B
    %% a comment
    style A fill:#f9f"""
DRAWN_CHART = """\
         ┌───────┐
         │ Start │
         └───┬───┘
             ▼
    ╱─────────────────╲
    │ Is it working?  │
    ╲───────┬─┬───────╱
            │ ▲
     ┌──────┴─│──┐
     │        └──│──┐
    Yes          No │
     ▼           ▼  │
╭─────────╮   ┌───────┐
│ Great!  │   │ Debug │
╰─────────╯   └───────┘"""
SEQUENCE = """sequenceDiagram
    participant A as Alice
    A->>Bob: Hello
    loop every minute
    Bob-->>A: 你好
    end
    Bob->>Bob: think
    Note over A,Bob: friends"""
DRAWN_SEQUENCE = """\
┌─────────┐ ┌───────┐
│  Alice  │ │  Bob  │
└────┬────┘ └───┬───┘
     │  Hello   │
     ├─────────►│
╌╌ loop every minute ╌╌╌╌╌╌╌
     │   你好   │
     │◄┄┄┄┄┄┄┄┄┄┤
╌╌ end ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
     │          ├──┐ think
     │          │◄─┘
   ┌─────────────┐
   │   friends   │
   └─────────────┘
     │          │"""


@pytest.mark.parametrize(("code", "drawn"), [(CHART, DRAWN_CHART), (SEQUENCE, DRAWN_SEQUENCE)])
def test_a_diagram_is_drawn_if_it_fits(code: str, drawn: str) -> None:
    rows = diagram_rows(code, 60)
    assert "\n".join(rows) == drawn
    widest = max(map(cell_len, rows))
    assert diagram_rows(code, widest) == rows
    assert diagram_rows(code, widest - 1) == ()


@pytest.mark.parametrize(
    "code",
    [
        "pie\n  a: 1", "flowchart TD\n  subgraph x\n  A --> B\n  end", "graph TD\n  A --> A",
        "sequenceDiagram\n  what is this", "sequenceDiagram", "graph TD", "",
        "graph TD\n" + "\n".join(f"A{n} --> A{n + 1}" for n in range(90)),
    ],
)  # fmt: skip
def test_a_diagram_that_cannot_be_drawn_is_shown_as_its_source(code: str) -> None:
    assert diagram_rows(code, 200) == ()
    fence = f"```mermaid\n{code}\n```"
    seen = [row.text.plain.strip() for row in MarkdownRows(fence).at(80)]
    assert seen[1:] == [line.strip() for line in code.split("\n")]


@given(st.text('AB[](){}|>-=.&;: \n"<xo\u202e你\u0301', max_size=80), st.integers(20, 80))
@settings(max_examples=200, deadline=None)
def test_any_diagram_source_stays_within_the_width(text: str, width: int) -> None:
    for begun in (
        "graph TD\nA[",
        "graph LR\nA-->B\n",
        "sequenceDiagram\nA->>B: ",
        "sequenceDiagram\n",
    ):
        rows = diagram_rows(begun + text, width)
        assert all(cell_len(row) <= width for row in rows)
        assert not any("\x1b" in row for row in rows)


def test_a_diagram_is_drawn_when_its_block_ends_and_copied_as_its_source(
    drive: Any, server: ScriptedServer
) -> None:
    server.play(Say([f"```mermaid\n{CHART}\n"]), Say(["```\n"]), Finish())
    copied: list[str] = []

    async def play(d: Driver) -> None:
        await d.ask("draw it")
        await d.until(lambda: "╲───────┬─┬───────╱" in d.screen())
        d.app.screen.query_one(AnswerView).query(GrowingText).last().text_select_all()
        await d.pilot.pause()
        await d.press("ctrl+c")
        assert copied == [CHART]

    drive(play, copy=lambda text: copied.append(text.strip("\n")) or True)


def test_an_unclosed_diagram_block_is_not_drawn_yet() -> None:
    rows = MarkdownRows(f"```mermaid\n{CHART}\n").at(80)
    assert rows[1].text.plain.strip() == "flowchart TD"
