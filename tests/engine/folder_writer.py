"""An engine in a process of its own that fills a folder of cached prefixes. Run by test_shared_folder.py:

python folder_writer.py FOLDER DISK_BYTES FIRST N [STOPS]

It reads the prompts FIRST … FIRST + N - 1 and prints the number of each. Before the last one it waits for
a line on standard input. With STOPS it stops for ever in the middle of a write of the last one, after it
printed "writing".
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from engine.drive import GREEDY, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from support.requests import request_for
from support.scripted_backend import ScriptedBackend


def prompt_of(number: int) -> list[int]:
    return [259, 10 + number, *[40 + i % 50 for i in range(600)], 259, 60]


def engine_of(folder: Path, disk_bytes: int) -> Engine:
    settings = EngineSettings(disk_dir=str(folder), disk_bytes=disk_bytes, headroom_bytes=0)
    return Engine(ScriptedBackend(n_ctx=2048, n_batch=256), settings)


def cached_of(engine: Engine, number: int) -> int:
    """Read a prompt, wait until it is on disk, and return how much of it was cached."""
    request = request_for(f"r{number}", prompt_of(number), max_tokens=2, sampling=GREEDY)
    cached = run(engine, request).finish(f"r{number}").usage.cached_tokens
    settle(engine)
    engine.pool.kv.disk.flush()
    return cached


def _stop(part: Path, whole: Path) -> Path:
    part.write_bytes(part.read_bytes()[:50])
    print("writing", flush=True)
    threading.Event().wait()
    return whole


def main() -> None:
    folder, disk_bytes, first, n, *stops = sys.argv[1:]
    engine = engine_of(Path(folder), int(disk_bytes))
    for number in range(int(first), int(first) + int(n)):
        if number == int(first) + int(n) - 1:
            sys.stdin.readline()
            if stops:
                Path.replace = _stop  # type: ignore[method-assign, assignment]
        cached_of(engine, number)
        print(number, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
