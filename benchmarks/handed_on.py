"""What it costs to reach a model through another of our servers: each request directly and through it, by turns.

Usage: python benchmarks/handed_on.py MODEL.gguf [REQUESTS]. Prints medians of the time of a request for one token, and of
the time per token of an answer of 128, both ways, and the share of processor time that the server in front took.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

_CONFIG = """allow_upstream = ["127.0.0.1"]
[[upstream]]
name = "behind"
url = "{url}/v1"
models = ["{model}"]
"""


def _serve(folder: Path, port: int, *what: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    env = {**os.environ, **{f"LOCALLLM_{n}_DIR": str(folder / n.lower()) for n in ("CONFIG", "DATA", "CACHE", "LOG")}}
    return subprocess.Popen(
        [sys.executable, "-m", "localllm", "serve", *what, "--port", str(port), "--only", "--quiet"], env=env
    )


def _ready(url: str) -> None:
    for _ in range(600):
        try:
            if httpx.get(url + "/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def _timed(http: httpx.Client, model: str, n_tokens: int) -> tuple[float, float]:
    """Seconds of a whole request, and between the first token and the last."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell a long story about a lighthouse."}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    started, first = time.perf_counter(), 0.0
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for piece in answer.iter_raw():
            if not first and b'"content"' in piece:
                first = time.perf_counter()
    ended = time.perf_counter()
    return ended - started, ended - first


def main() -> None:
    path, n = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        behind_url, front_url = "http://127.0.0.1:18701", "http://127.0.0.1:18702"
        behind = _serve(root / "behind", 18701, str(path))
        front_folder = root / "front"
        (front_folder / "config").mkdir(parents=True)
        front = None
        try:
            _ready(behind_url)
            model = httpx.get(behind_url + "/v1/models", trust_env=False).json()["data"][0]["id"]
            (front_folder / "config" / "config.toml").write_text(_CONFIG.format(url=behind_url, model=model))
            env = {
                **os.environ,
                **{f"LOCALLLM_{k}_DIR": str(root / "front" / k.lower()) for k in ("CONFIG", "DATA", "CACHE", "LOG")},
            }
            front = subprocess.Popen(
                [sys.executable, "-m", "localllm", "serve", "--only", "--port", "18702", "--quiet"], env=env
            )
            _ready(front_url)
            with (
                httpx.Client(base_url=behind_url, trust_env=False, timeout=60) as direct,
                httpx.Client(base_url=front_url, trust_env=False, timeout=60) as through,
            ):
                for http in (direct, through):
                    _timed(http, model, 4)
                ones: list[list[float]] = [[], []]
                tokens: list[list[float]] = [[], []]
                busy = psutil.Process(front.pid)
                spent = [sum(busy.cpu_times()[:2])]
                for i in range(n):
                    for k in (0, 1) if i % 2 else (1, 0):
                        ones[k].append(_timed((direct, through)[k], model, 1)[0] * 1e3)
                spent.append(sum(busy.cpu_times()[:2]))
                for i in range(n):
                    for k in (0, 1) if i % 2 else (1, 0):
                        tokens[k].append(_timed((direct, through)[k], model, 128)[1] / 127 * 1e3)
                spent.append(sum(busy.cpu_times()[:2]))
            one_ms, many_ms = ((b - a) / n * 1e3 for a, b in itertools.pairwise(spent))
            print(
                f"processor time of the server in front: {one_ms:.2f} ms a request, {(many_ms - one_ms) / 127:.3f} ms a token"
            )
            a, b = (statistics.median(x) for x in ones)
            print(f"a request for one token: {a:.2f} ms directly, {b:.2f} ms through it: {b - a:+.2f} ms")
            a, b = (statistics.median(x) for x in tokens)
            print(f"a token of 128: {a:.3f} ms directly, {b:.3f} ms through it: {b / a - 1:+.1%}")
            paired = sorted(y / x - 1 for x, y in zip(*tokens, strict=True))
            print(
                f"  paired: median {statistics.median(paired):+.1%}, quartiles {paired[n // 4]:+.1%} {paired[3 * n // 4]:+.1%}"
            )
        finally:
            for process in (front, behind):
                if process is not None:
                    process.terminate()
                    process.wait()


if __name__ == "__main__":
    main()
