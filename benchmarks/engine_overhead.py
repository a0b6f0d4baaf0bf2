"""The engine's loop compared with a bare llama_decode loop (bar: 0.97; over HTTP 0.90).

python -m benchmarks.engine_overhead [--rounds 7] [--model FILE] [--http]
python -m benchmarks.engine_overhead --known [--rounds 7]

Both loops use the same build. The bars are shares of tg128 and pp512, over HTTP of tg128.
--http: decode through `localllm serve` and its stream, with the client on the same cores.
--known: processor time of a request with a fully cached prompt. The model has one narrow layer, so
its step takes almost no time and only the host's work counts (bars: 6 ms at 2,000 tokens, 25 at
20,000). It takes half a minute. It uses processor time, so other programs may run.

"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from benchmarks.rounds import interleave, report, timed
from benchmarks.step_http import CHATML
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import unseen_text, user
from localllm.bench.stream import free_port
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.native import start_native
from localllm_backends.llamacpp.threads import usable_cores
from tests.models import tiny_gguf

_WINDOW, _REPEATS = 32_768, 20
_KNOWN_BARS_MS = {2_000: 6, 20_000: 25}


class Bare:
    """A context with llama.cpp's own defaults, used as llama-bench does."""

    def __init__(self, path: Path) -> None:
        self.llama: Any = start_native()
        self.model = self.llama.llama_model_load_from_file(
            str(path).encode(), self.llama.llama_model_default_params()
        )
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = (
            2048,
            usable_cores(),
            usable_cores(),
        )
        params.n_batch, params.n_ubatch = 2048, 512
        self.context = self.llama.llama_init_from_model(self.model, params)
        self.memory = self.llama.llama_get_memory(self.context)
        self.n_vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.memory, False)

    def prefill(self, n: int) -> float:
        """Return the tokens/s of one prompt of n tokens."""
        self.clear()
        tokens = (self.llama.llama_token * n)(
            *[(i * 7919) % (self.n_vocab - 10) + 5 for i in range(n)]
        )
        started = time.perf_counter()
        self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(tokens, n))
        self.llama.llama_synchronize(self.context)
        return n / (time.perf_counter() - started)

    def decode(self, n: int) -> float:
        """Return the tokens/s of n single-token steps from an empty context, without sampling, as
        llama-bench."""
        self.clear()
        token = (self.llama.llama_token * 1)(5)
        started = time.perf_counter()
        for i in range(n):
            token[0] = (i * 7919) % (self.n_vocab - 10) + 5
            self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(token, 1))
            self.llama.llama_synchronize(self.context)
        return n / (time.perf_counter() - started)


class Ours:
    """The engine on the backend, as in the worker."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(backend_type.load(LoadSpec(str(path), n_ctx=2048)))
        self.n = 0

    def _run(self, prompt: list[int], n: int) -> tuple[float, float]:
        self.n += 1
        greedy = Generation(Sampling(temperature=0.0), n, ignore_eos=True, cache_prompt=False)
        request = Request(f"r{self.n}", prompt, greedy, draft="off")
        return timed(self.engine, request, prompt)

    def prefill(self, n: int) -> float:
        prompt = [
            (i * 7919 + self.n) % (self.engine.backend.info.n_vocab - 10) + 5 for i in range(n)
        ]
        return n / self._run(prompt, 1)[0]

    def decode(self, n: int) -> float:
        return n / self._run([5], n + 1)[1]


def over_http(path: Path, rounds: int) -> None:
    """Decode through our server."""
    with empty_home():
        port = free_port()
        server = Server("localllm over HTTP", serve_command(path, port, "--quiet"), port)
        server.start()
        bare, table = Bare(path), RoundComparison("decode, 128 tokens", "tok/s")
        chat = server.target.chat
        chat(user("Warm up."), 8)

        def our_round() -> None:
            story = user(f"Tell a story. {len(table.known_values(server.name))}")
            table.add(server.name, chat(story, 128).decode_tok_s)

        interleave(rounds, lambda: table.add("llama_decode loop", bare.decode(128)), our_round)
        server.stop()
    report([table], server.name)


def known(rounds: int) -> None:
    """Measure the processor time of requests with a fully cached prompt, of server and worker
    together."""
    with empty_home() as home:
        model = tiny_gguf.write_llama(home / "tiny.gguf", layers=1, n_ctx=_WINDOW, template=CHATML)
        port = free_port()
        command = serve_command(model, port, "--context", f"{_WINDOW}", "--quiet")
        server = Server("localllm", command, port)
        server.start()
        target = server.target
        for tokens, bar_ms in _KNOWN_BARS_MS.items():
            # Five tokens per word, and some for the template.
            asked = user(unseen_text(tokens // 5 - 10, tokens))
            target.chat(asked, 1)
            time.sleep(1.0)
            spent_ms, first_ms = [], []
            for _ in range(rounds):
                before_s = server.cpu_s()
                answers = [target.chat(asked, 1) for _ in range(_REPEATS)]
                # The system counts processor time in hundredths of a second.
                spent_ms.append(1000 * (server.cpu_s() - before_s) / _REPEATS)
                first_ms += [1000 * answer.ttft_s for answer in answers]
            print(
                f"{answers[0].usage['prompt_tokens']:,} known tokens: "
                f"{statistics.median(spent_ms):.1f} ms of processor (bar {bar_ms}), "
                f"{min(spent_ms):.1f} to {max(spent_ms):.1f}; "
                f"first token after {statistics.median(first_ms):.1f} ms",
                flush=True,
            )
        server.stop()


def in_process(path: Path, rounds: int) -> None:
    """Measure decode and prefill of the engine."""
    bare, ours = Bare(path), Ours(path)
    tg, pp = (
        RoundComparison("decode, 128 tokens", "tok/s"),
        RoundComparison("prefill, 512 tokens", "tok/s"),
    )

    def bare_round() -> None:
        tg.add("llama_decode loop", bare.decode(128))
        pp.add("llama_decode loop", bare.prefill(512))

    def our_round() -> None:
        tg.add("engine", ours.decode(128))
        pp.add("engine", ours.prefill(512))

    bare.decode(16)
    ours.decode(16)
    interleave(rounds, bare_round, our_round)
    report([tg, pp], "engine")


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--known", action="store_true")
    arguments = parser.parse_args()
    if arguments.known:
        known(arguments.rounds)
        return
    (over_http if arguments.http else in_process)(arguments.model or smollm2(), arguments.rounds)


if __name__ == "__main__":
    main()
