"""The texts that servers are measured with: none recurs, so that no cache and no draft knows what it should not."""

from __future__ import annotations

import random

from localllm.bench.stream import Messages

# About 1,400 tokens: as long as a coding agent's instructions are at least.
SYSTEM = "You are a careful assistant. " + "Rule: answer shortly, plainly and only about what was asked. " * 110
NAMES = ("apple", "brook", "cedar", "delta", "ember", "frost", "grove", "haven", "inlet", "jetty", "knoll", "lagoon")


def user(text: str) -> Messages:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def unique(words: int, seed: int) -> str:
    """Text no cache has seen, about five tokens a word."""
    return " ".join(f"w{(seed * 7919 + i * 104729) % 9973}" for i in range(words))


def source_file(seed: int, functions: int = 7) -> str:
    """A Python file that no model has seen: about 36 to 55 tokens a function, by the tokenizer."""
    rng = random.Random(seed)
    lines = []
    for i in range(functions):
        a, b = rng.sample(NAMES, 2)
        lines += [
            f"def {a}_{b}_{i}({a}: int, limit: int = {rng.randrange(10, 999)}) -> int:",
            f"    if {a} > limit:",
            f"        return {a} - {rng.randrange(2, 99)}",
            f"    return {a} * {rng.randrange(2, 99)} + {b!r}.count('e')",
            "",
        ]
    return "\n".join(lines)


def copy_edit(seed: int) -> str:
    """A file, and the beginning of its copy with one word changed: text to continue. The copy is begun for the model, and
    shown once already: a small one left to itself writes something else, which says nothing about drafting."""
    text = source_file(seed)
    head = "\n".join(text.splitlines()[:5]).replace("def ", "async def ", 1)
    return f"{text}\n\n---\n\n{text}\n\n---\n\n{head}\n"
