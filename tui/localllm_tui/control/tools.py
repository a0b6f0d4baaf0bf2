"""Tools that a model may ask for while it answers: off until they are switched on, and each call
waits for a yes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from localllm.errors import LocalLLMError, UsageError
from localllm.foreign_json import MalformedError, parse
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import ToolHost, ToolSpec
from localllm_tui.control.stream_events import (
    AnswerDone,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolResult,
    ToolStarted,
    WaitNote,
)
from localllm_tui.control.terminal import printable

# The most rounds of tool calls within one answer.
MAX_ROUNDS = 8
# The most characters of one result that the model gets.
MAX_CHARS = 20_000
NOT_ALLOWED = "The user did not allow this call."


ToolApprover = Callable[[ToolCall, ToolSpec], Awaitable[bool]]


class ToolBox:
    """The hosts of config.toml, and the tools of those that are on."""

    def __init__(self, hosts: Sequence[ToolHost] = ()) -> None:
        self.hosts = {host.name: host for host in hosts}
        self._open: dict[str, Sequence[ToolSpec]] = {}
        self._allowed: set[tuple[str, str]] = set()  # run without a question

    @property
    def on(self) -> bool:
        return any(self._open.values())

    async def switch_on(self, name: str = "") -> None:
        """Start one host, or all. Raises UsageError or what starting one ended in."""
        if not self.hosts:
            raise UsageError(
                "config.toml has no program with tools",
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

    def allow(self, spec: ToolSpec) -> None:
        """Run later calls of this tool without a question, until the tools are switched off."""
        self._allowed.add((spec.host, spec.name))

    def allows(self, spec: ToolSpec) -> bool:
        return (spec.host, spec.name) in self._allowed

    async def switch_off(self) -> None:
        self._allowed.clear()
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
        return "\n".join(lines) or "config.toml has no programs with tools"

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

    async def run(
        self, call: ToolCall, approves: ToolApprover
    ) -> AsyncGenerator[ToolStarted | ToolResult, None]:
        """Run a call, once it is approved; a failure becomes the result's text."""
        spec = self.specs().get(call.name)
        if spec is None:
            yield ToolResult(call, f"There is no tool {call.name}.", allowed=False)
            return
        try:
            arguments = parse(call.arguments or "{}").cleaned()
        except MalformedError:
            arguments = None
        if not isinstance(arguments, dict):
            yield ToolResult(call, "The arguments are not a JSON object.", allowed=False)
        elif not self.allows(spec) and not await approves(call, spec):
            yield ToolResult(call, NOT_ALLOWED, allowed=False)
        else:
            yield ToolStarted(call)
            yield await self._result(call, spec, arguments)

    async def _result(
        self, call: ToolCall, spec: ToolSpec, arguments: Mapping[str, Any]
    ) -> ToolResult:
        try:
            sent = await self.hosts[spec.host].call(spec.name, arguments)
        except LocalLLMError as e:
            sent = f"The call failed: {e.message}"
        result = printable(sent)
        if len(result) > MAX_CHARS:
            result = f"{result[:MAX_CHARS]}\n(cut: {len(result) - MAX_CHARS:,} more characters)"
        return ToolResult(call, result, allowed=True)


def approval_texts(call: ToolCall, spec: ToolSpec) -> tuple[str, str, str]:
    """The texts of the approval of a call: the question, the tool, and all of the arguments, one on
    each line."""
    about = " ".join(spec.description.split())
    arguments = json.dumps(parse(call.arguments or "{}").value, indent=2, ensure_ascii=False)
    named = f"{spec.host}: {spec.name}"
    if about:
        named = f"{spec.host}: {spec.name} – {about}"
    return "the model calls a tool", named, arguments


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
    sent: list[Mapping[str, Any]] = [*messages]
    for rounds in range(MAX_ROUNDS + 1):
        calls: list[ToolCall] = []
        text = ""
        offered = box.offered() if rounds < MAX_ROUNDS else []
        async with aclosing(client.stream(model, sent, tools=offered, **more)) as events:
            async for event in events:
                if isinstance(event, ToolCall):
                    calls.append(event)
                    continue
                if calls and isinstance(event, AnswerDone):
                    continue  # the answer continues with the results
                if isinstance(event, TextDelta):
                    text += event.text
                yield event
        if not calls:
            return
        requests = []
        for call in calls:
            function = {"name": call.name, "arguments": call.arguments}
            requests.append({"id": call.id, "type": "function", "function": function})
        sent.append({"role": "assistant", "content": text, "tool_calls": requests})
        for call in calls:
            yield WaitNote(f"{call.name} waits for your approval")
            async with aclosing(box.run(call, approves)) as steps:
                async for ran in steps:
                    yield ran
                    if isinstance(ran, ToolResult):
                        result = {"tool_call_id": call.id, "content": ran.result}
                        sent.append({"role": "tool", **result})
