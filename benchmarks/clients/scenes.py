"""Scenes besides the loop: an MCP tool, parallel calls, Ctrl-C, a full context, an image.

make bench ARGS="clients scenes --only codex,claude"

"""

from __future__ import annotations

import base64
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.clients.agent import Agent, Place, end, judge, start, wait
from benchmarks.clients.brain import READ, SHELL, TASK, Offered, Worker, fill, named
from benchmarks.clients.loops import Stage, arguments, because, stage
from benchmarks.clients.notations import Notation

# The first agents are programs with a terminal of their own. The others are libraries and similar.
_WITH_SCENES = 10
MOST_S = 0.3  # from Ctrl-C to the end of generation
_TAIL_CHARS = 5_000
_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
Calls = list[tuple[str, dict[str, Any]]]


class Counting(Worker):
    """Calls the MCP server's tool before it answers."""

    sign = "41 geese were counted"

    def calls(self, prompt: str, tools: Sequence[Offered]) -> Calls:
        """Return the usual calls, then the count."""
        usual = super().calls(prompt, tools)
        # The name may contain a namespace.
        name = re.search(r"[\w.-]*count_birds", prompt)
        if usual or not tools or name is None or self.sign in prompt or "count" in self.steps:
            return usual
        finder = named(tools, ("tool_search", "toolsearch"))
        caller = named(tools, ("tool_call",))
        given = {"place": "the pond", "limit": 1_234_567}
        if caller is not None and "find" in self.steps:
            self.steps.append("count")  # a client that calls hidden tools through another tool
            properties = caller.schema["properties"]
            return [
                (
                    caller.name,
                    {
                        key: name[0] if described.get("type") == "string" else given
                        for key, described in properties.items()
                    },
                )
            ]
        if not any(name[0].endswith(t.name) for t in tools) and finder is not None:
            self.steps.append("find")  # a client that offers its tools on demand
            return [
                (
                    finder.name,
                    fill({**finder.schema, "required": []}, {"query": f"select:{name[0]}"}),
                )
            ]
        self.steps.append("count")
        schema = next((t.schema for t in tools if name[0].endswith(t.name)), {})
        return [(name[0], {k: given[k] for k in schema.get("properties") or given})]

    def answer(self, prompt: str, tools: Sequence[Offered]) -> str:
        """Record whether the count arrived."""
        if tools and self.sign in prompt:
            self.steps.append("counted")
        return super().answer(prompt, tools)


class Parallel(Worker):
    """Makes its first call twice at once."""

    def calls(self, prompt: str, tools: Sequence[Offered]) -> Calls:
        """Return two reads in one reply, if the model writes several calls."""
        usual = super().calls(prompt, tools)
        return (
            usual * 2
            if usual and self.notation.parallel and self.steps.count("read") == 1
            else usual
        )


class Looking(Worker):
    """Looks at a picture before it answers."""

    def calls(self, prompt: str, tools: Sequence[Offered]) -> Calls:
        """Return the usual calls, then the picture."""
        usual = super().calls(prompt, tools)
        by_name = {t.name.lower(): t for t in tools}
        tool = next((by_name[n] for n in ("view_image", *READ) if n in by_name), None)
        if usual or tool is None or "look" in self.steps:
            return usual
        self.steps.append("look")
        return [
            (tool.name, fill(tool.schema, {"path": str(self.folder / "dot.png"), "command": ""}))
        ]


class Endless(Worker):
    """Never stops generating."""

    def __call__(self, prompt: str) -> list[str]:
        """Return a very long answer."""
        self.steps.append("answer")
        return [self.notation.write("Well.", "and so on, " * 5_000, ())]


class Flooding(Worker):
    """Fills the context with a command's output before it continues. Its summary is a few words."""

    floods = 4

    def __call__(self, prompt: str) -> list[str]:
        """Return a summary if the end of the prompt requests one."""
        if self.steps.count("flood") > 1 and "summar" in prompt[-_TAIL_CHARS:].lower():
            self.steps.append("summary")
            return [
                self.notation.write(
                    "I sum up.", f"<summary>The task: {TASK} Numbers were printed.</summary>", ()
                )
            ]
        return super().__call__(prompt)

    def calls(self, prompt: str, tools: Sequence[Offered]) -> Calls:
        """Return the calls with long output first."""
        if tools and self.steps.count("flood") < self.floods:
            return self._flood(tools)
        return super().calls(prompt, tools)

    def _flood(self, tools: Sequence[Offered]) -> Calls:
        return self._step("flood", named(tools, SHELL), "seq 1 6000 | tr '\\n' ' '")


def mcp(agent: Agent, notation: Notation, program: Path) -> str:
    """An MCP server's tool is called with a large number, and its result reaches the prompt."""
    if agent.mcp is None:
        return "not tried"
    with stage(replace(agent, worker=Counting), notation, program) as on:
        command = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
        ended = wait(*start(agent, on.place, command), agent.limit_s)
        stopped = judge(agent, on.place, on.worker, ended)
        if not stopped and "counted" not in on.worker.steps:
            stopped = (
                "the tool was not offered"
                if "count" not in on.worker.steps
                else ("its result did not come")
            )
        return _said(stopped, on)


def _looped(
    worker: type[Worker], prepare: Callable[[Place], None] | None = None
) -> Callable[..., str]:
    def scene(agent: Agent, notation: Notation, program: Path) -> str:
        with stage(replace(agent, worker=worker), notation, program) as on:
            if prepare is not None:
                prepare(on.place)
            ended = wait(*start(agent, on.place), agent.limit_s)
            return _said(judge(agent, on.place, on.worker, ended), on)

    return scene


def _picture(place: Place) -> None:
    (place.folder / "dot.png").write_bytes(_PNG)


def interrupt(agent: Agent, notation: Notation, program: Path) -> str:
    """Ctrl-C while the model decodes: measure how long the engine continues."""
    with stage(replace(agent, worker=Endless), notation, program, pause_s=0.02) as on:
        process, _ = start(agent, on.place)
        try:
            until = time.monotonic() + agent.start_s
            while not on.model.running and time.monotonic() < until and process.poll() is None:
                time.sleep(0.01)  # wait for another process
            if not on.model.running:
                return "no answer was begun"
            time.sleep(0.5)  # in the middle of the answer
            pressed = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            while on.model.running and time.monotonic() < pressed + 10:
                time.sleep(0.005)
            gone = [e.gone_s for e in on.exchanges if e.gone_s is not None]
            ended = on.model.left_s[-1] if on.model.left_s and not on.model.running else None
        finally:
            end(process)
        if ended is None:
            return "the client went on reading for 10 s"
        hung_up = max(gone) if gone else pressed
        return (
            f"{max(0.0, ended - hung_up):.2f} s after it hung up ({ended - pressed:.2f} s "
            "after "
            "Ctrl-C)"
        )


def restart(agent: Agent, notation: Notation, program: Path) -> str:
    """The server stops in the middle of an answer and starts again. The client retries."""
    with stage(agent, notation, program, pause_s=0.02) as on:
        process, output = start(agent, on.place)
        until = time.monotonic() + agent.start_s
        while time.monotonic() < until and process.poll() is None:
            if on.model.running and "read" in on.worker.steps:
                break
            time.sleep(0.01)  # wait for another process
        else:
            end(process)
            return "no answer was begun"
        on.restart()
        ended = wait(process, output, agent.limit_s)
        stopped = judge(agent, on.place, on.worker, ended)
        return f"ended with it: {stopped}" if stopped else "complete"


def overflow(agent: Agent, notation: Notation, program: Path) -> str:
    """The files are longer than the context. The client shortens the conversation and continues, or
    reports the error."""
    with stage(replace(agent, worker=Worker), notation, program) as on:
        wait(*start(agent, on.place), agent.limit_s)
        sizes = [len(r.prompt) for r in on.model.requests]
    if not sizes:
        return "no answer was begun"
    with stage(replace(agent, worker=Flooding), notation, program, n_ctx=max(sizes) + 60_000) as on:
        ended = wait(*start(agent, on.place), agent.limit_s)
        stopped = judge(agent, on.place, on.worker, ended)
        refused = sum(
            e.status == 400 or b"context_length" in e.reply or b"too long" in e.reply
            for e in on.exchanges
        )
        told = f"told {refused} time{'s' * (refused > 1)}, " if refused else ""
        compacted = "summary" in on.worker.steps
        end_of_it = (
            "went on"
            if not stopped
            else f"shortened the conversation, then: {stopped}"
            if compacted
            else stopped
        )
        return told + end_of_it


def _said(stopped: str, on: Stage) -> str:
    return stopped + because(on.model, on.exchanges) if stopped else "complete"


SCENES: Mapping[str, Callable[[Agent, Notation, Path], str]] = {
    "mcp": mcp,
    "parallel": _looped(Parallel),
    "image": _looped(Looking, _picture),
    "interrupt": interrupt,
    "restart": restart,
    "overflow": overflow,
}


def main() -> None:
    """Run the clients and scenes of the command line."""
    given = arguments(__doc__, {"--scenes": "scenes by name, comma-separated"})
    names = given.scenes.split(",") if given.scenes else list(SCENES)
    if not given.only:
        given.agents = given.agents[:_WITH_SCENES]
    for agent, program in given.programs():
        for notation in given.notations:
            for name in names:
                said = "offers no tools"
                if agent.offers_tools or name == "interrupt":
                    said = SCENES[name](agent, notation, program)
                print(f"{agent.name:14} {notation.name:18} {name:10} {said}", flush=True)
                given.add(
                    f"{agent.name} {notation.name} {name}", {"version": agent.version, "said": said}
                )


if __name__ == "__main__":
    main()
