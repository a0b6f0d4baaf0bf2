"""The command line: one thin file per command, heavy imports inside the commands."""
