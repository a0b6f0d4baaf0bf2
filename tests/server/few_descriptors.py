"""Run a server in a process that may open at most 64 files.

`python -m server.few_descriptors` prints the server's port. It ends when its input ends.
"""

from __future__ import annotations

import logging
import resource
import sys

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    logging.basicConfig()
    with running_server({"tiny": ScriptedEngine()}, quiet=False) as server:
        print(server.port, flush=True)
        sys.stdin.read()
