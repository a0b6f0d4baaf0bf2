"""The command line with every command, for the docs, the man pages and the tests."""

from __future__ import annotations

from localllm.cli.root_command import command_line

app = command_line()
