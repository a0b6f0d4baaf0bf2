"""What config.toml says of the chat itself: its keys, and the programs that offer it tools.

[chat_keys]
"chat.stop" = "ctrl+k"
"turn.edit" = "e,f9"

[mcp.files]
command = "npx"
args = ["-y", "@modelcontextprotocol/server-filesystem", "."]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.serve.config_tables import check_keys, named_tables
from localllm.errors import UsageError
from localllm.settings import config_path, read_config

if TYPE_CHECKING:
    from localllm_tui.mcp_host import McpHost


def take_keys() -> None:
    """Have the chat's keys as config.toml has them. Raises UsageError."""
    from localllm_tui.control import keys
    from localllm_tui.control.commands import KEY_IDS

    table = read_config().get("chat_keys", {})
    if not isinstance(table, dict):
        raise UsageError(f"{config_path()}: `chat_keys` is a table: [chat_keys]")
    keys.remap(table, KEY_IDS)


def tool_hosts() -> tuple[McpHost, ...]:
    """The programs of [mcp.NAME]; none is started. Raises UsageError."""
    from localllm_tui.mcp_host import McpHost

    hosts = []
    for name, table in named_tables("mcp", "program").items():
        where = f"[mcp.{name}] of config.toml"
        check_keys(table, ("command", "args", "env"), where)
        command, args, env = table.get("command"), table.get("args", []), table.get("env", {})
        if not isinstance(command, str) or not command.strip():
            raise UsageError(f'{where} needs a command, such as "npx"')
        if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
            raise UsageError(f"args in {where} must be a list of texts")
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise UsageError(f"env in {where} must be a table of texts")
        hosts.append(McpHost(name, command, tuple(args), env))
    return tuple(hosts)
