"""Programs that offer tools over the Model Context Protocol, on their standard input and output
(the `mcp` SDK)."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import LocalLLMError
from localllm_tui import mcp_relay
from localllm_tui.control.interfaces import ToolSpec
from localllm_tui.control.terminal import printable

_CALL_S = 120.0
_MAX_REASON = 300


@dataclass(slots=True)
class McpHost:
    """Implements control.interfaces.ToolHost. `start_s`: the longest wait for its list of tools.

    A line of more than MAX_LINE_BYTES ends the program (mcp_relay.py). The program gets the few
    environment variables that the SDK passes on, and `env`. The screen uses the terminal, so the end
    of the program's standard error goes to a file, whose last line is shown if it ended."""

    name: str
    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 30.0
    _session: Any = None
    _task: asyncio.Task[None] | None = None
    _errors: Any = None
    _last_error: str = ""

    async def open(self) -> Sequence[ToolSpec]:
        ready: asyncio.Future[Sequence[ToolSpec]] = asyncio.get_running_loop().create_future()
        # The SDK's contexts must be left by the task that entered them.
        self._task = asyncio.create_task(self._live(ready))
        try:
            return await asyncio.wait_for(asyncio.shield(ready), self.start_s)
        except Exception as e:
            why = self._reason(e)
            await self.close()
            hint = f"try it by hand: {' '.join([self.command, *self.args])}"
            if isinstance(e, ImportError):
                hint = "tools need an optional package: pip install 'localllm[tools]'"
            if isinstance(e, TimeoutError):
                why = f"it did not answer for {self.start_s:g} s"
            raise LocalLLMError(f"{self.name} does not start: {why}", hint=hint) from e

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._session is None:
            raise LocalLLMError(f"{self.name} is no longer running: start the chat again")
        try:
            result = await self._session.call_tool(
                name, dict(arguments), read_timeout_seconds=_CALL_S
            )
        except Exception as e:
            raise LocalLLMError(f"{self.name}: {self._reason(e)}") from e
        parts = [
            getattr(part, "text", None) or f"[{part.type}]"
            for part in getattr(result, "content", ())
        ]
        text = "\n".join(parts)
        if getattr(result, "is_error", False):
            return f"error: {text}"
        return text

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(self._task, 5.0)
        self._task = self._session = None

    async def _live(self, ready: asyncio.Future[Sequence[ToolSpec]]) -> None:
        try:
            from mcp import StdioServerParameters

            program = shutil.which(self.command, path=self.env.get("PATH"))
            if program is None:
                raise FileNotFoundError(f"there is no program {self.command}")
            relay = [sys.executable, "-I", mcp_relay.__file__]
            parameters = StdioServerParameters(
                command=relay[0], args=[*relay[1:], program, *self.args], env=dict(self.env) or None
            )
            with tempfile.TemporaryFile() as self._errors:
                try:
                    await self._serve_session(parameters, ready)
                finally:
                    self._read_errors()
        except Exception as e:
            if not ready.done():
                ready.set_exception(e)
        finally:
            self._session = self._errors = None

    async def _serve_session(
        self, parameters: Any, ready: asyncio.Future[Sequence[ToolSpec]]
    ) -> None:
        from mcp import ClientSession, stdio_client

        async with (
            stdio_client(parameters, errlog=self._errors) as (read, write),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            listed = await session.list_tools()
            self._session = session
            specs = [
                ToolSpec(t.name, t.description or "", t.input_schema, self.name)
                for t in listed.tools
            ]
            if not ready.done():
                ready.set_result(specs)
            await asyncio.Event().wait()  # closing cancels it

    def _reason(self, e: BaseException) -> str:
        while isinstance(e, BaseExceptionGroup) and e.exceptions:
            e = e.exceptions[0]
        if str(e) != "Connection closed":
            return str(e) or type(e).__name__
        self._read_errors()
        if self._last_error:
            return f"it ended: {self._last_error}"
        return "it ended without an error message"

    def _read_errors(self) -> None:
        """Keep the last line that the program wrote to its standard error."""
        if self._errors is None:
            return
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        for line in lines:
            shown = printable(line).strip()
            if shown:
                self._last_error = shown[:_MAX_REASON]
