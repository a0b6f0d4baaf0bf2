"""How long a stream waits while another request's long prefix comes back from a slow disk: its longest step, and the median.

python -m benchmarks.restore_stall [--mb-s 130] [--tokens 6000] [--threads N] [--model FILE]

The disk is one that is made slow: each file takes as long as it would on a disk of that many MB/s (0: it is left as it is).
The line is larger than the memory cache, and its engine was restarted, so that every piece is read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.models import smollm2
from localllm.engine.cache import kv_file
from localllm.engine.core import Engine, EngineSettings
from localllm.engine.messages import Finish, Generation, Request, Sampling, Text
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type


def _request(key: str, prompt: list[int], n: int) -> Request:
    return Request(key, prompt, Generation(Sampling(temperature=0.0), n, ignore_eos=True))


def _engine(path: Path, folder: str, threads: int) -> Engine:
    spec = LoadSpec(str(path), n_ctx=16_384, n_threads=threads, n_threads_batch=threads)
    return Engine(backend_type.load(spec), EngineSettings(disk_dir=folder))


def _run(engine: Engine, request: Request, prompt: list[int]) -> None:
    engine.submit(request, prompt)
    while engine.has_work:
        engine.step() if engine.can_step else engine.idle()
    while engine.idle():
        pass


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb-s", type=float, default=130.0)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    path = arguments.model or smollm2()

    def slowly(file: Path) -> kv_file.Readable:
        time.sleep(file.stat().st_size / arguments.mb_s / 1e6)
        return file.open("rb", buffering=0)

    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(path, folder, arguments.threads)
        line = [(i * 7919) % (engine.backend.info.n_vocab - 100) + 50 for i in range(arguments.tokens)]
        _run(engine, _request("first", line, 4), line)
        engine.close()
        engine = _engine(path, folder, arguments.threads)
        assert engine.pool.kv.disk is not None
        if arguments.mb_s:
            engine.pool.kv.disk.open_file = slowly
        engine.submit(_request("stream", [50, 60, 70], 4000), [50, 60, 70])
        for _ in range(40):
            engine.step()
        steps: list[float] = []
        engine.submit(_request("again", [*line, 55], 1), [*line, 55])
        started, before, cached, done = time.perf_counter(), 0, 0, False
        while not done:
            began = time.perf_counter()
            for event in engine.step():
                before += isinstance(event, Text) and event.id == "stream"
                if isinstance(event, Finish) and event.id == "again":
                    cached, done = event.usage.cached_tokens, True
            steps.append(time.perf_counter() - began)
        print(
            f"{cached} of {len(line)} tokens from a disk of {arguments.mb_s:.0f} MB/s in {time.perf_counter() - started:.2f} s; "
            f"the stream had {before} tokens meanwhile, its longest step took {1000 * max(steps):.1f} ms, "
            f"the median {1000 * statistics.median(steps):.1f} ms"
        )
        engine.close()


if __name__ == "__main__":
    main()
