"""The command line with every command, for those who look at all of it: the docs, the man pages,
the tests."""

from __future__ import annotations

from localllm.cli.main import command_line

app = command_line()
