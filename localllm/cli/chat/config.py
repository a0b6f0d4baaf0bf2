"""The chat's own tables in config.toml: key bindings, and MCP servers that offer tools.

[chat_keys]
"chat.stop" = "ctrl+k"
"turn.edit" = "e,f9"

[mcp.files]
command = "npx"
args = ["-y", "@modelcontextprotocol/server-filesystem", "."]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from localllm.cli.serve.config_tables import named_tables, read_table
from localllm.errors import UsageError
from localllm.settings import config_path, read_config

if TYPE_CHECKING:
    from localllm_tui.mcp_host import McpHost


def apply_key_bindings() -> None:
    """Apply the key bindings of config.toml. Raises UsageError."""
    from localllm_tui.control import keys
    from localllm_tui.control.commands import ALL_KEYS

    table = read_config().get("chat_keys", {})
    if not isinstance(table, dict):
        raise UsageError(f"{config_path()}: `chat_keys` must be a table: [chat_keys]")
    keys.remap(table, ALL_KEYS)


def tool_hosts() -> tuple[McpHost, ...]:
    """Return the MCP servers of [mcp.NAME] without starting them. Raises UsageError."""
    tables = named_tables("mcp", "program")
    if not tables:
        return ()
    from pydantic import StringConstraints

    from localllm_tui.mcp_host import McpHost

    command = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    hosts = []
    for name, table in tables.items():
        values = read_table(
            table,
            f"[mcp.{name}] of config.toml",
            command=(command, ...),
            args=(list[str], []),
            env=(dict[str, str], {}),
        )
        hosts.append(McpHost(name, values["command"], tuple(values["args"]), values["env"]))
    return tuple(hosts)
