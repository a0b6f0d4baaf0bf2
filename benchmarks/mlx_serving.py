"""The MLX backend against mlx-lm on the same weights: its own generate loop in one process, mlx_lm.server over HTTP.

    python -m benchmarks.mlx_serving [--model FOLDER] [--rounds 5] [--only decode,prefill,four,eight,stall,warm,...]

Without --model it converts the starter model to float32: MLX's quantised matmul is scalar on a CPU. MLX's Linux wheel
brings a reference BLAS (one core, no vector instructions, so batching gains nothing): preload a real one for both sides
alike, LD_PRELOAD=/path/to/libopenblas.so, and say so beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import serve_command, smollm2
from benchmarks.ratio import Comparison, write
from benchmarks.seen import Messages, Seen
from benchmarks.serving import SYSTEM, Server, unique, user
from benchmarks.sse import Answer, free_port, stream, wait_ready

IN_PROCESS = ("decode", "prefill")
OVER_HTTP = ("single", "four", "eight", "stall", "warm", "thrash", "restart")
OURS, THEIRS = "localllm", "mlx-lm"
# What each server calls the one model it was started with.
MODEL_NAMES = {OURS: "", THEIRS: "default_model"}
_CACHE = Path(__file__).parent.parent / ".cache" / "models" / "smollm2-135m-instruct-f32"


class Tables:
    """Figures by title, and words nobody used yet."""

    def __init__(self) -> None:
        self.tables: dict[str, Comparison] = {}
        self._seed = int(time.time())

    def put(self, title: str, unit: str, name: str, value: float) -> None:
        """Record one figure."""
        self.tables.setdefault(title, Comparison(title, unit)).add(name, value)

    def fresh(self) -> int:
        """A number nobody used."""
        self._seed += 1
        return self._seed


class InProcess:
    """One stream through the backend's `step`, and through mlx_lm.generate.generate_step, in turn."""

    def __init__(self, tables: Tables, model: Path) -> None:
        from mlx_lm.utils import load_model

        from localllm_backends.contract import LoadSpec
        from localllm_backends.mlx import backend_type

        self._tables = tables
        self._backend: Any = backend_type.load(LoadSpec(str(model), n_ctx=8192))
        self._theirs: Any = load_model(model)[0]

    def decode(self, n_tokens: int = 128) -> None:
        """Tokens per second after the first, greedy."""
        prompt = self._backend.tokenize(f"Tell a story about number {self._tables.fresh()}.")
        for name, run in ((OURS, self._our_tokens), (THEIRS, self._their_tokens)):
            times = [time.perf_counter() for _ in run(prompt, n_tokens)]
            self._tables.put("decode in process", "tok/s", name, (len(times) - 1) / (times[-1] - times[0]))

    def prefill(self, n_tokens: int = 1024) -> None:
        """Prompt tokens per second up to the first token."""
        prompt = self._backend.tokenize(unique(n_tokens, self._tables.fresh()))[:n_tokens]
        for name, run in ((OURS, self._our_tokens), (THEIRS, self._their_tokens)):
            begun = time.perf_counter()
            next(iter(run(prompt, 1)))
            self._tables.put("prefill in process", "tok/s", name, n_tokens / (time.perf_counter() - begun))

    def _our_tokens(self, prompt: list[int], n: int) -> Iterator[int]:
        from localllm_backends.contract import Chunk

        backend = self._backend
        sequence = backend.new_sequence()
        size = backend.info.n_batch
        for i in range(0, len(prompt), size):
            result = backend.step([Chunk(sequence, prompt[i : i + size], 1 if i + size >= len(prompt) else 0)])
        for i in range(n):
            (token,) = result.argmax(0)
            yield token
            if i + 1 < n:
                result = backend.step([Chunk(sequence, [token])])
        backend.drop(sequence)

    def _their_tokens(self, prompt: list[int], n: int) -> Iterator[int]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(mx.array(prompt), self._theirs, max_tokens=n):
            yield int(token)


def ask(server: Server, messages: list[dict[str, str]], n: int, **more: Any) -> Answer:
    """One greedy streamed chat answer of at most `n` tokens."""
    body = {"model": MODEL_NAMES[server.name], "messages": messages, "max_tokens": n, "temperature": 0}
    return stream(server.port, body, **more)


def tokens_of(answer: Answer) -> int:
    """Tokens the server says it made."""
    return int(str(answer.usage.get("completion_tokens", len(answer.gaps_s) + 1)))


class OverHttp:
    """Each method runs one scenario once on one server and records its figures."""

    def __init__(self, tables: Tables, model: Path) -> None:
        self._tables, self._model = tables, model

    def single(self, s: Server) -> None:
        """Decode speed of one stream."""
        answer = ask(s, user(f"Tell a story. {self._tables.fresh()}"), 128)
        self._tables.put("one stream", "tok/s", s.name, answer.decode_tok_s)

    def four(self, s: Server) -> None:
        """4 streams."""
        self._streams(s, 4)

    def eight(self, s: Server) -> None:
        """8 streams."""
        self._streams(s, 8)

    def _streams(self, s: Server, n: int) -> None:
        answers: list[Answer] = []
        texts = [f"Tell a long story about number {self._tables.fresh()}." for _ in range(n)]
        begun = time.perf_counter()
        threads = [threading.Thread(target=lambda t=t: answers.append(ask(s, user(t), 96))) for t in texts]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        total = sum(map(tokens_of, answers))
        self._tables.put(f"aggregate, {n} streams", "tok/s", s.name, total / (time.perf_counter() - begun))

    def stall(self, s: Server) -> None:
        """A 3,000-token prompt beside a running stream: the stream's largest gap, and the newcomer's TTFT."""
        answers: list[Answer] = []
        going = threading.Event()

        def first() -> None:
            text = f"Write a very long story about number {self._tables.fresh()}"
            answers.append(ask(s, user(text), 500, on_token=lambda n: going.set() if n == 30 else None))
            going.set()

        thread = threading.Thread(target=first)
        thread.start()
        going.wait(120)
        second = ask(s, user(unique(610, self._tables.fresh())), 4)
        thread.join()
        gaps = sorted(answers[0].gaps_s)
        self._tables.put("stall: largest gap ÷ normal gap", "×", s.name, gaps[-1] / gaps[len(gaps) // 2])
        self._tables.put("stall: newcomer's TTFT", "s", s.name, second.ttft_s)

    def warm(self, s: Server) -> None:
        """A long prefix, then a new last turn."""
        head = [{"role": "system", "content": f"{self._tables.fresh()} {SYSTEM}"}, *user("First question?")]
        cold = ask(s, head, 8)
        time.sleep(0.3)
        warm = ask(s, [*head[:1], *user("Second, other question?")], 8)
        again = ask(s, [*head[:1], *user("Second, other question?")], 8)
        self._tables.put("new turn ÷ cold TTFT", "×", s.name, warm.ttft_s / cold.ttft_s)
        self._tables.put("identical prompt ÷ cold TTFT", "×", s.name, again.ttft_s / cold.ttft_s)

    def thrash(self, s: Server) -> None:
        """Three chats with one system prompt, three growing turns each, in turn; tokens prefilled that were known."""
        seen = Seen(_prompts(self._model))
        system = {"role": "system", "content": f"{self._tables.fresh()} {SYSTEM}"}
        chats = [[system, *user(f"I am person {i}. Hello!")] for i in range(3)]
        ttfts: list[float] = []
        for turn in range(3):
            for messages in chats:
                answer = seen.ask(messages, partial(ask, s, messages, 24))
                ttfts.append(answer.ttft_s)
                messages += [{"role": "assistant", "content": answer.text}, *user(f"And then, number {turn}?")]
        self._tables.put("thrash: tokens prefilled twice", "tokens", s.name, seen.twice)
        self._tables.put(
            "thrash: mean TTFT after the first ÷ first", "×", s.name, sum(ttfts[1:]) / len(ttfts[1:]) / ttfts[0]
        )

    def restart(self, s: Server) -> None:
        """The same long prompt after a clean restart."""
        messages = [{"role": "system", "content": f"{self._tables.fresh()} {SYSTEM}"}, *user("Question?")]
        cold = ask(s, messages, 8)
        time.sleep(1.0)
        s.stop()
        s.start()
        ask(s, user("Warm up."), 4)
        again = ask(s, messages, 8)
        self._tables.put("restart: TTFT ÷ cold", "×", s.name, again.ttft_s / cold.ttft_s)


def _prompts(model: Path) -> Callable[[Messages], list[int]]:
    """Tokens of messages as the checkpoint's template makes them."""
    from mlx_lm.utils import load_tokenizer

    tokenizer: Any = load_tokenizer(model)

    def tokens(messages: Messages) -> list[int]:
        asked = messages[-1]["role"] != "assistant"
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return tokens


@contextlib.contextmanager
def running(servers: list[Server]) -> Iterator[None]:
    """Both servers for the length of the block."""
    try:
        for s in servers:
            s.start()
            wait_ready(s.port)
            ask(s, user("Warm up."), 4)
        yield
    finally:
        for s in servers:
            if s.process is not None and s.process.poll() is None:
                s.stop()


def checkpoint() -> Path:
    """The starter model as a float32 checkpoint, converted once."""
    from tests.models.mlx_from_gguf import convert

    return convert(smollm2(), _CACHE)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join((*IN_PROCESS, *OVER_HTTP)))
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    model = arguments.model or checkpoint()
    wanted = arguments.only.split(",")
    tables = Tables()
    inside = [name for name in wanted if name in IN_PROCESS]
    outside = [name for name in wanted if name in OVER_HTTP]
    rounds = range(arguments.rounds)
    if inside:
        runs: list[Callable[[], None]] = [getattr(InProcess(tables, model), name) for name in inside]
        for run in runs:
            run()
        tables.tables.clear()
        for _ in rounds:
            for run in runs:
                run()
    if outside:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["LOCALLLM_CACHE_DIR"] = cache
            ports = free_port(), free_port()
            ours = serve_command(model, ports[0], "--context", "16384", "--parallel", "8", "--quiet")
            theirs = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(ports[1])]
            servers = [Server(THEIRS, theirs, ports[1]), Server(OURS, ours, ports[0])]
            scenarios = OverHttp(tables, model)
            with running(servers):
                for i in rounds:
                    for name in outside:
                        for server in servers:
                            getattr(scenarios, name)(server)
                    print(f"  round {i + 1}/{arguments.rounds}", file=sys.stderr)
    write(arguments.out, [table.report(THEIRS) for table in tables.tables.values()])


if __name__ == "__main__":
    main()
