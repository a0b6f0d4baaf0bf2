"""Passes on what a tool program writes, line by line, and ends it at a line that is too long.

The SDK collects a line of any length in memory, and copies it for each piece that arrives. This file
is run as a program of its own, with the program and its arguments as arguments.
"""

import subprocess
import sys

MAX_LINE_BYTES = 8 << 20


def relay(words: list[str]) -> int:
    """Run the program `words` and pass its lines on. Returns its exit code, or 1 after a line of
    more than MAX_LINE_BYTES."""
    program = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert program.stdout is not None
    while True:
        line = program.stdout.readline(MAX_LINE_BYTES + 1)
        if not line:
            return program.wait()
        if len(line) > MAX_LINE_BYTES:
            program.kill()
            return 1
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(relay(sys.argv[1:]))
