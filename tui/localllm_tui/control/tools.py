"""Tools that a model may ask for while it answers: off until they are switched on, and each call
waits for a yes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import ToolHost, ToolSpec
from localllm_tui.control.stream_events import (
    AnswerDone,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolResult,
    WaitNote,
)
from localllm_tui.control.terminal import printable

# The most rounds of tool calls within one answer.
MOST_ROUNDS = 8
# The most characters of one result that the model gets.
MOST_CHARS = 20_000
NOT_ALLOWED = "The person did not allow this call."


ToolApprover = Callable[[ToolCall, ToolSpec], Awaitable[bool]]


class ToolBox:
    """The hosts of config.toml, and the tools of those that are on."""

    def __init__(self, hosts: Sequence[ToolHost] = ()) -> None:
        self.hosts = {host.name: host for host in hosts}
        self._open: dict[str, Sequence[ToolSpec]] = {}

    @property
    def on(self) -> bool:
        return any(self._open.values())

    async def switch_on(self, name: str = "") -> None:
        """Start one host, or all. Raises UsageError or what starting one ended in."""
        if not self.hosts:
            raise UsageError(
                "config.toml names no program that offers tools",
                hint='add one: [mcp.files] with command = "npx" and args = ["-y", '
                '"@modelcontextprotocol/server-filesystem", "."]',
            )
        if name and name not in self.hosts:
            raise UsageError(
                f"config.toml has no [mcp.{name}]", hint=f"it has {', '.join(self.hosts)}"
            )
        for host in self.hosts.values():
            if host.name not in self._open and name in ("", host.name):
                self._open[host.name] = await host.open()

    async def switch_off(self) -> None:
        for name in [*self._open]:
            del self._open[name]
            await self.hosts[name].close()

    def specs(self) -> dict[str, ToolSpec]:
        """Return the tools by the names the model sees. If two hosts use the same name, one gets a
        prefix."""
        found: dict[str, ToolSpec] = {}
        for host, specs in self._open.items():
            for spec in specs:
                name = spec.name
                if name in found:
                    name = f"{host}_{name}"
                found[name] = spec
        return found

    def overview(self) -> str:
        lines = []
        for name in self.hosts:
            tools = self._open.get(name)
            if tools is None:
                lines.append(f"{name}: off")
            elif tools:
                lines.append(f"{name}: {', '.join(spec.name for spec in tools)}")
            else:
                lines.append(f"{name}: on, without tools")
        return "\n".join(lines) or "no programs that offer tools are named in config.toml"

    def offered(self) -> list[dict[str, Any]]:
        """The tools as a request names them."""
        tools: list[dict[str, Any]] = []
        for name, spec in self.specs().items():
            function = {
                "name": name,
                "description": spec.description,
                "parameters": dict(spec.schema),
            }
            tools.append({"type": "function", "function": function})
        return tools

    async def run(self, call: ToolCall, approves: ToolApprover) -> ToolResult:
        """Run a call, once it is approved; a failure becomes the result's text."""
        spec = self.specs().get(call.name)
        if spec is None:
            return ToolResult(call, f"There is no tool {call.name}.", allowed=False)
        try:
            arguments = json.loads(call.arguments or "{}")
            if not isinstance(arguments, dict):
                raise ValueError
        except ValueError:
            return ToolResult(call, "The arguments are not a JSON object.", allowed=False)
        if not await approves(call, spec):
            return ToolResult(call, NOT_ALLOWED, allowed=False)
        try:
            said = await self.hosts[spec.host].call(spec.name, arguments)
        except LocalLLMError as e:
            said = f"The call failed: {e.message}"
        result = printable(said)
        if len(result) > MOST_CHARS:
            result = f"{result[:MOST_CHARS]}\n(cut: {len(result) - MOST_CHARS:,} more characters)"
        return ToolResult(call, result, allowed=True)


def approval_texts(call: ToolCall, spec: ToolSpec) -> tuple[str, str, str]:
    """The texts of the approval of a call: the question, the tool, and all of the arguments, one on
    each line."""
    about = " ".join(spec.description.split())
    arguments = json.dumps(json.loads(call.arguments or "{}"), indent=2, ensure_ascii=False)
    named = f"{spec.host}: {spec.name}"
    if about:
        named = f"{spec.host}: {spec.name} – {about}"
    return "the model asks for a tool", named, arguments


async def stream_with_tools(
    client: ChatClient,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    box: ToolBox,
    approves: ToolApprover,
    **more: Any,
) -> AsyncGenerator[StreamEvent, None]:
    """`client.stream` with the tools of `box`: calls run between its parts, and the model continues
    with their results. One stream, with one AnswerDone."""
    said: list[Mapping[str, Any]] = [*messages]
    for rounds in range(MOST_ROUNDS + 1):
        calls: list[ToolCall] = []
        text = ""
        offered = box.offered() if rounds < MOST_ROUNDS else []
        async with aclosing(client.stream(model, said, tools=offered, **more)) as events:
            async for event in events:
                if isinstance(event, ToolCall):
                    calls.append(event)
                    continue
                if calls and isinstance(event, AnswerDone):
                    continue  # the answer goes on with the results
                if isinstance(event, TextDelta):
                    text += event.text
                yield event
        if not calls:
            return
        asked = []
        for call in calls:
            function = {"name": call.name, "arguments": call.arguments}
            asked.append({"id": call.id, "type": "function", "function": function})
        said.append({"role": "assistant", "content": text, "tool_calls": asked})
        for call in calls:
            yield WaitNote(f"{call.name} waits for your yes")
            ran = await box.run(call, approves)
            yield ran
            said.append({"role": "tool", "tool_call_id": call.id, "content": ran.result})
