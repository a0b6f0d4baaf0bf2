"""The starter model: 30 everyday questions with many seeds, by system prompt and sampling.

python -m benchmarks.starter [--seeds 20] [--first-seed 1] [--tokens 64] [--only NAME ...]
    [--llama-cpp-python]

The program counts the answers whose first sentence is sensible, by a pattern for each question, and
those that loop: half of the last 96 words are groups of three words that the answer had before.
Only answers of 48 words and more can loop, so --tokens must be large enough. Answers go to
--answers FILE, so that a person can judge them too. --llama-cpp-python compares with that package.
The figures do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from localllm.bench.stream import free_port

_AT_ONCE = 8
_ANSWER_S = 600.0
_WINDOW_WORDS = 96
QUESTIONS = {
    "What is the capital of France?": r"\bparis\b",
    "What is the capital of Italy?": r"\brome\b",
    "How many days are in a week?": r"\b(7|seven)\b",
    "What is 2 + 2?": r"\b(4|four)\b",
    "What colour is the sky on a clear day?": r"\bblue\b",
    "Who wrote Romeo and Juliet?": r"shakespeare",
    "What is the largest planet in the solar system?": r"jupiter",
    "What is the opposite of hot?": r"\bcold",
    "What do bees make?": r"honey",
    "What language is spoken in Brazil?": r"portuguese",
    "How many months are in a year?": r"\b(12|twelve)\b",
    "What is the freezing point of water in Celsius?": r"\b(0|zero)\b",
    "Name a fruit that is yellow.": r"banana|lemon|pineapple|mango",
    "What animal says meow?": r"\bcat",
    "What is the first month of the year?": r"january",
    "What do plants need to grow?": r"water|sun|light|soil|nutrient",
    "Say hello in Spanish.": r"hola|buenos",
    "What is H2O?": r"water",
    "On which continent is Egypt?": r"africa",
    "What is the currency of Japan?": r"\byen\b",
    "Write a short sentence about a dog.": r"\bdog|puppy",
    "Give me a tip for better sleep.": r"sleep|bed|relax|caffeine|routine|night",
    "What can I cook with eggs?": r"egg|omelet|scrambl|frittata|cake",
    "Thank you!": r"welcome|glad|thank|pleasure|happy|help",
    "Hello!": r"hello|\bhi\b|help|welcome|today",
    "What is the sun?": r"\bstar\b|energy|light|hydrogen|heat",
    "Why do we wear coats in winter?": r"warm|cold|heat|temperature|insulat",
    "Name three colours.": r"red|blue|green|yellow|orange|purple|black|white",
    "What is a library?": r"book|read|information|knowledge|collection",
    "How do I boil water?": r"heat|stove|pot|pan|kettle|boil",
}


@dataclass(frozen=True)
class Variant:
    """A way to ask. `system`: None keeps the template's own prompt. `raw`: no system prompt."""

    name: str
    system: str | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    raw: bool = False


_BRIEF = "Answer the question in one or two short sentences."
_COOL = {"temperature": 0.2, "top_p": 0.9, "repeat_penalty": 1.1}
VARIANTS = (
    Variant("defaults"),
    Variant("no system prompt", raw=True),
    Variant("empty system prompt", ""),
    Variant("no system prompt, cool", sampling=_COOL, raw=True),
    Variant("empty, cool", "", _COOL),
    Variant("brief, cool", _BRIEF, _COOL),
    Variant("brief, 0.2", _BRIEF, {"temperature": 0.2}),
    Variant("defaults, cool", None, _COOL),
    Variant("no system prompt, 0.2", sampling={"temperature": 0.2}, raw=True),
    Variant("empty, 0.2", "", {"temperature": 0.2}),
)


def sensible(question: str, answer: str) -> bool:
    """Return whether the first sentence contains the words of a right answer."""
    lines = answer.strip().splitlines() or [""]
    first = re.split(r"(?<=[.!?])\s", " ".join(lines[:2]))
    return re.search(QUESTIONS[question], " ".join(first[:1]).lower()) is not None


def loops(answer: str) -> bool:
    """Return whether half of the last words end groups of three that the answer had before."""
    words = answer.lower().split()
    seen: set[tuple[str, ...]] = set()
    repeated = []
    for n in range(2, len(words)):
        three = tuple(words[n - 2 : n + 1])
        repeated.append(three in seen)
        seen.add(three)
    last = repeated[-_WINDOW_WORDS:]
    return len(last) >= _WINDOW_WORDS // 2 and sum(last) > len(last) / 2


def ask(url: str, variant: Variant, question: str, seed: int, tokens: int) -> str:
    """Return one answer of the server at `url`."""
    body: dict[str, Any] = {"seed": seed, "max_tokens": tokens, **variant.sampling}
    if variant.raw:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        answer = httpx.post(
            f"{url}/completions", json=body | {"prompt": prompt}, timeout=_ANSWER_S
        ).raise_for_status()
        return str(answer.json()["choices"][0]["text"])
    messages = [{"role": "user", "content": question}]
    if variant.system is not None:
        messages.insert(0, {"role": "system", "content": variant.system})
    answer = httpx.post(
        f"{url}/chat/completions", json=body | {"messages": messages}, timeout=_ANSWER_S
    ).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def _of_server(url: str, tokens: int) -> Callable[[Variant, str, int], str]:
    def one(variant: Variant, question: str, seed: int) -> str:
        return ask(url, variant, question, seed, tokens)

    return one


def _of_llama_cpp_python(tokens: int) -> Callable[[Variant, str, int], str]:
    import llama_cpp

    llama = llama_cpp.Llama(str(smollm2()), n_ctx=2048, verbose=False)

    def one(variant: Variant, question: str, seed: int) -> str:
        if variant.raw:
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            said: Any = llama.create_completion(
                prompt, max_tokens=tokens, seed=seed, stop=["<|im_end|>"]
            )
            return str(said["choices"][0]["text"])
        messages: Any = [{"role": "user", "content": question}]
        said = llama.create_chat_completion(messages, max_tokens=tokens, seed=seed)
        return str(said["choices"][0]["message"]["content"])

    return one


def measured(
    variant: Variant, seeds: range, one: Callable[[Variant, str, int], str], at_once: int
) -> Iterator[tuple[str, int, str]]:
    """Yield question, seed and text of all answers."""
    asked = [(question, seed) for question in QUESTIONS for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        answers = [pool.submit(one, variant, question, seed) for question, seed in asked]
        for (question, seed), answer in zip(asked, answers, strict=True):
            yield question, seed, answer.result()


def report(name: str, answers: list[tuple[str, int, str]], file: Path | None) -> None:
    """Print the counts of a variant, and append its answers to `file`."""
    n_sensible = sum(sensible(question, text) for question, _, text in answers)
    n_loops = sum(loops(text) for _, _, text in answers)
    n_long = sum(len(text.split()) >= _WINDOW_WORDS // 2 for _, _, text in answers)
    paris = [text for question, _, text in answers if "France" in question]
    n_paris = sum(sensible("What is the capital of France?", text) for text in paris)
    print(
        f"{name:32} sensible {n_sensible:4} of {len(answers)}   Paris {n_paris} of {len(paris)}   "
        f"loops {n_loops} of {n_long} long ones",
        flush=True,
    )
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            for question, seed, text in answers:
                row = {"variant": name, "question": question, "seed": seed, "answer": text}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    """Ask every question with every seed in every variant, and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--llama-cpp-python", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    chosen = [variant for variant in VARIANTS if not options.only or variant.name in options.only]
    if options.llama_cpp_python:
        one = _of_llama_cpp_python(options.tokens)
        for variant in VARIANTS[:2]:
            answers = [*measured(variant, seeds, one, 1)]
            report(f"llama-cpp-python, {variant.name}", answers, options.answers)
        return
    with empty_home():
        port = free_port()
        server = Server("localllm", serve_command(smollm2(), port), port)
        server.start()
        try:
            one = _of_server(f"http://127.0.0.1:{port}/v1", options.tokens)
            for variant in chosen:
                answers = [*measured(variant, seeds, one, _AT_ONCE)]
                report(variant.name, answers, options.answers)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
