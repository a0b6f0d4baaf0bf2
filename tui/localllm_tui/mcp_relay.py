"""Passes on what a tool program writes, line by line, and ends it at a line that is too long.

The SDK collects a line of any length in memory, and copies it for each piece that arrives. This file
is run as a program of its own, with the program and its arguments as arguments. When the program has
ended, the end of its standard error follows on this one's.
"""

import subprocess
import sys
import threading
from typing import IO

MAX_LINE_BYTES = 8 << 20
_MAX_ERROR_BYTES = 4096
# seconds. A child of the program may hold its standard error open.
_PATIENCE_S = 1.0


def relay(words: list[str]) -> int:
    """Run the program `words` and pass its lines on. Returns its exit code, or 1 after a line of
    more than MAX_LINE_BYTES."""
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    errors = bytearray()
    reader = threading.Thread(target=_keep_end, args=[program.stderr, errors], daemon=True)
    reader.start()
    while True:
        line = program.stdout.readline(MAX_LINE_BYTES + 1)
        if not line:
            code = program.wait()
            break
        if len(line) > MAX_LINE_BYTES:
            program.kill()
            code = 1
            errors += b"\nit wrote a line of more than %d MiB" % (MAX_LINE_BYTES >> 20)
            break
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    reader.join(_PATIENCE_S)
    sys.stderr.buffer.write(errors)
    sys.stderr.buffer.flush()
    return code


def _keep_end(pipe: IO[bytes], end: bytearray) -> None:
    """Read `pipe` to its end, and keep its last bytes."""
    while True:
        piece = pipe.read1(_MAX_ERROR_BYTES)  # type: ignore[attr-defined]
        if not piece:
            return
        end += piece
        del end[:-_MAX_ERROR_BYTES]


if __name__ == "__main__":
    sys.exit(relay(sys.argv[1:]))
