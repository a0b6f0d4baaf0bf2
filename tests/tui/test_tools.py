"""Tools in the chat.

They are off by default. Each call shows its arguments and needs the user's consent. Results are
folded, and cannot control the terminal.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from localllm import paths
from localllm.cli.chat.config import tool_hosts
from localllm.conversation.history import History
from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control.answering import STOPPED_CALL
from localllm_tui.control.interfaces import ToolSpec
from localllm_tui.control.tools import MAX_ROUNDS, NOT_ALLOWED
from localllm_tui.mcp_host import McpHost
from localllm_tui.screens.dialogs import Approval
from localllm_tui.widgets.answer import ToolFold
from tui.conftest import Driver
from tui.scripted_sse import Finish, Raw, Say, ScriptedServer


class Host:
    """A program that offers one tool and records its calls."""

    name = "clock"

    def __init__(self, says: str = "noon") -> None:
        self.says = says
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.open_now = False

    async def open(self) -> Sequence[ToolSpec]:
        self.open_now = True
        return [ToolSpec("time", "what time it is", {"type": "object"}, self.name)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.asked.append((name, arguments))
        return self.says

    async def close(self) -> None:
        self.open_now = False


def asks(name: str = "time", arguments: str = '{"zone": "CET"}') -> list[Any]:
    """Return the stream of a model that calls a tool, with the arguments in two pieces."""
    half = len(arguments) // 2
    pieces = [
        {
            "index": 0,
            "id": "c1",
            "type": "function",
            "function": {"name": name, "arguments": arguments[:half]},
        },
        {"index": 0, "function": {"arguments": arguments[half:]}},
    ]
    chunks = [
        {"choices": [{"index": 0, "delta": {"tool_calls": [p]}, "finish_reason": None}]}
        for p in pieces
    ]
    return [*(Raw(f"data: {json.dumps(c)}\n\n".encode()) for c in chunks), Finish("tool_calls")]


def test_no_tool_is_offered_until_tools_are_turned_on(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")
    host = Host()

    async def play(d: Driver) -> None:
        await d.ask("q")
        assert "tools" not in server.requests[0]
        assert not host.open_now
        await d.send("/tools")
        await d.until(lambda: "clock: off" in d.screen())

    drive(play, tools=(host,))


def test_an_approved_tool_runs_and_the_answer_continues_with_its_result(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    host = Host("12:00\x1b[2J")
    server.play(Say(["Let me look. "]), *asks())
    server.answer("It is noon.", usage=(40, 5, 30))

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.until(lambda: "tools on" in d.screen().splitlines()[0])
        await d.send("what time is it?")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await d.pilot.pause()
        assert "clock: time – what time it is" in d.screen()
        assert '"zone": "CET"' in d.screen()
        assert d.app.screen.children[0].region.bottom <= d.app.page.composer.region.y
        assert host.asked == []
        await d.press("y")
        await d.until(lambda: not d.app.chat.answering)
        assert host.asked == [("time", {"zone": "CET"})]
        assert "It is noon." in d.screen()
        fold = d.app.screen.query_one(ToolFold)
        assert fold.collapsed
        second = server.requests[1]["messages"]
        assert second[-2]["tool_calls"][0]["function"] == {
            "name": "time",
            "arguments": '{"zone": "CET"}',
        }
        assert second[-1] == {"role": "tool", "tool_call_id": "c1", "content": "12:00[2J"}
        answer = d.app.chat.session.last_answer
        assert answer is not None
        assert answer.content == "Let me look. It is noon."
        assert answer.meta["tools"][0]["result"] == "12:00[2J"
        assert d.app.chat.session.used_tokens == 45
        await d.send("/tools off")
        await d.until(lambda: not host.open_now)

    drive(play, tools=(host,))


@pytest.mark.parametrize("key", ["n", "escape", "ctrl+c"])
def test_a_tool_that_is_not_approved_does_not_run(
    drive: Any, server: ScriptedServer, key: str
) -> None:
    host = Host()
    server.play(*asks())
    server.answer("Then I can't say.")

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.send("q")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await d.press("enter", "space")  # neither option
        assert isinstance(d.app.screen, Approval)
        await d.press(key)
        await d.until(lambda: not d.app.chat.answering)
        assert host.asked == []
        assert server.requests[1]["messages"][-1]["content"] == NOT_ALLOWED
        assert "did not run" in d.screen()

    drive(play, tools=(host,))


def test_a_call_that_cannot_run_is_reported_to_the_model(
    drive: Any, server: ScriptedServer
) -> None:
    server.play(*asks("rm", "{}"))
    server.play(*asks("time", '["no object"]'))
    server.answer("sorry")

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.ask("q")
        told = [r["messages"][-1]["content"] for r in server.requests[1:]]
        assert told == ["There is no tool rm.", "The arguments are not a JSON object."]

    drive(play, tools=(Host(),))


def test_a_model_that_calls_tools_endlessly_is_stopped(drive: Any, server: ScriptedServer) -> None:
    for _ in range(MAX_ROUNDS):
        server.play(*asks("nothing"))
    server.answer("enough")

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.ask("q")
        assert "tools" in server.requests[0]
        assert "tools" not in server.requests[-1]
        assert "enough" in d.screen()

    drive(play, tools=(Host(),), size=(80, 50))


def test_an_invalid_tool_table_in_config_is_an_error() -> None:
    paths.private_dir(paths.config_dir())
    file = paths.config_dir() / "config.toml"
    for text, why in (
        ("mcp = 1", "one table per program"),
        ("[mcp.a]\nargs = []", "command in .* is missing"),
        ('[mcp.a]\ncommand = "x"\nshell = true', "unknown key: shell"),
        ('[mcp.a]\ncommand = "x"\nargs = "y"', "args in .* must be a list"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=why):
            tool_hosts()
    file.write_text('[mcp.files]\ncommand = "npx"\nargs = ["-y"]\n')
    assert [(h.name, h.command, h.args) for h in tool_hosts()] == [("files", "npx", ("-y",))]


SERVER = """
from mcp.server import MCPServer
server = MCPServer("sums")
@server.tool()
def add(a: int, b: int) -> str:
    "add two numbers"
    return f"{a} and {b} are {a + b}"
@server.tool()
def fail() -> str:
    raise RuntimeError("no luck")
server.run()
"""


def test_an_mcp_program_is_started_called_and_ended(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "sums.py").write_text(SERVER)
    pythonpath = {"PYTHONPATH": ":".join(p for p in sys.path if p)}

    async def main() -> None:
        host = McpHost("sums", sys.executable, (str(tmp_path / "sums.py"),), pythonpath)
        specs = {spec.name: spec for spec in await host.open()}
        assert specs["add"].description == "add two numbers"
        assert set(specs["add"].schema["properties"]) == {"a", "b"}
        assert await host.call("add", {"a": 2, "b": 3}) == "2 and 3 are 5"
        assert (await host.call("fail", {})).startswith("error: ")
        await host.close()
        with pytest.raises(LocalLLMError, match="no longer running"):
            await host.call("add", {})
        with pytest.raises(LocalLLMError, match="does not start"):
            await McpHost("gone", "/nowhere/at/all").open()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("while True: sys.stdout.write('x' * 65536)", "a line of more than 8 MiB"),
        ("print('no JSON', flush=True)", "it ended"),
        ("sys.exit(3)", "it ended without an error message"),
        (
            "import no_such_module",
            "it ended: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("sys.exit('\\x1b[2Jno\\x1b[m key\\n\\n')", r"it ended: \[2Jno\[m key"),
        ("sys.exit('x' * 100_000)", "it ended: x{300}$"),
        ("sys.stdin.buffer.read()", "did not answer for 1 s"),
        ("[print('[' * 100_000, flush=True) for _ in sys.stdin.buffer]", "did not answer for 1 s"),
    ],
)
def test_a_program_that_misbehaves_is_an_error_with_its_reason(program: str, why: str) -> None:
    """A tool program that misbehaves causes an error with its reason.

    The last two programs never answer, although one of them writes 100,000 brackets.
    """
    pytest.importorskip("mcp")

    async def main() -> None:
        limit_s = 1.0 if "1 s" in why else 60.0
        code = f"import sys; exec({program!r})"
        host = McpHost("odd", sys.executable, ("-c", code), start_s=limit_s)
        with pytest.raises(LocalLLMError, match=f"odd does not start: .*{why}"):
            await host.open()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("result", "why"), [("'x' * 9_000_000", "more than 8 MiB"), ("os._exit(1)", "it ended")]
)
def test_a_call_with_too_much_output_or_a_dead_program_is_an_error(
    tmp_path: Path, result: str, why: str
) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "odd.py").write_text(
        SERVER.replace("from mcp", "import os\nfrom mcp").replace(
            'f"{a} and {b} are {a + b}"', result
        )
    )
    pythonpath = {"PYTHONPATH": ":".join(p for p in sys.path if p)}

    async def main() -> None:
        host = McpHost("odd", sys.executable, (str(tmp_path / "odd.py"),), pythonpath)
        await host.open()
        with pytest.raises(LocalLLMError, match=why):
            await host.call("add", {"a": 2, "b": 3})
        await host.close()

    asyncio.run(main())


class SlowHost(Host):
    """A program whose calls end when a test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.asked.append((name, arguments))
        await self.go_on.wait()
        return "noon"


def test_a_running_call_is_shown_and_stays_in_the_history_after_esc(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(*asks())

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.send("what time is it?")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await d.press("y")
        await d.until(lambda: "▸ tool: time … " in d.screen())
        assert " s, Esc stops" in d.screen()
        await d.press("escape")
        await d.until(lambda: not d.app.chat.answering)
        assert "Esc stops" not in d.screen()
        fold = d.app.page.transcript.query_one(ToolFold)
        assert fold.collapsed
        await d.press("f2", "t")  # the keyboard unfolds it
        await d.until(lambda: not fold.collapsed)
        assert STOPPED_CALL in d.screen()

    drive(play, tools=(SlowHost(),))
    stored = history.messages(history.list()[0].id)[-1]
    assert stored.meta["tools"][0]["result"] == STOPPED_CALL


def test_the_key_a_allows_a_tool_until_tools_are_turned_off(
    drive: Any, server: ScriptedServer
) -> None:
    host = Host()
    for _ in range(3):
        server.play(*asks())
    server.answer("noon")
    server.play(*asks())
    server.answer("no")

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.send("q")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        assert "A in this chat" in d.screen()
        await d.press("a")
        await d.until(lambda: not d.app.chat.answering)
        assert len(host.asked) == 3
        await d.send("/tools off")
        await d.until(lambda: not host.open_now)
        await d.send("/tools on")
        await d.send("again")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await d.press("n")

    drive(play, tools=(host,))
