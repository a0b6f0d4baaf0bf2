"""What one key can learn of another's prompts by time: a guessed one's first token against a fresh one's.

python -m benchmarks.neighbours [--rounds 20] [--model FILE] [--out FILE]

A key asks a prompt; another key asks the same one, and one that nobody asked: their first tokens must take as long. What the
key itself waits for it again shows what there would be to see.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from benchmarks.rounds import report, write
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import unique, user
from localllm.bench.stream import BenchTarget, free_port

_KEYS = {"anna": "anna-anna-anna-anna-anna", "bob": "bob-bob-bob-bob-bob-bob"}
_GUESSED_WORDS = 40


def guess(server: BenchTarget, rounds: int) -> RoundComparison:
    """First tokens' times of a guessed prompt, a fresh one, and one's own again."""
    asked = {name: BenchTarget(name, server.url, key=key) for name, key in _KEYS.items()}
    table = RoundComparison("first token of a prompt", "s", "less")
    for i in range(rounds):
        own, fresh = (unique(_GUESSED_WORDS, 2 * i + which) for which in range(2))
        asked["anna"].chat(user(own), 2)
        tries = [("guessed", own), ("fresh", fresh)]
        cached = []
        for name, prompt in tries if i % 2 else reversed(tries):
            answer = asked["bob"].chat(user(prompt), 2)
            table.add(name, answer.ttft_s)
            cached.append(answer.cached_tokens or 0)
        # The template's beginning, which is bob's own once he has asked, and a piece of a first word.
        assert max(cached) < 40, f"cached_tokens tell what another has asked: {cached}"
        table.add("one's own again", asked["anna"].chat(user(own), 2).ttft_s)
    return table


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    with empty_home() as home:
        config = home / "config" / "config.toml"
        config.parent.mkdir()
        config.write_text("".join(f'[keys.{name}]\nenv = "KEY_{name}"\n' for name in _KEYS), encoding="utf-8")
        os.environ.update({f"KEY_{name}": key for name, key in _KEYS.items()})
        port = free_port()
        command = serve_command(str(arguments.model or smollm2()), port, "--context", "8192", "--quiet")
        server = Server("localllm", command, port, key=_KEYS["anna"])
        server.start()
        try:
            write(arguments.out, [report(guess(server.target, arguments.rounds), "fresh")])
        finally:
            server.stop()


if __name__ == "__main__":
    main()
