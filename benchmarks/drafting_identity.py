"""Greedy answers of each drafter, and of none, against isolated runs: 100 prompts, alone and in batches of four; how
many part, and where.

    python -m benchmarks.drafting_identity [--prompts 100] [--tokens 64]

Verification is said to be free, so that everything guessed is drafted. Answers may part where the two best logits are a
near-tie (llama.cpp's kernels differ in the last bits between batch shapes); the gap there is reported in units of the
row's spread, as tests/engine/crowds.py defines it. Batches part without drafting too; the first lines say how
often.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.models import smollm2
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp import backend_type

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from engine.crowds import isolated
from engine.drive import GREEDY, run
from engine.speculation.test_speculation_real import speculating
from localllm.engine.messages import Generation, Request
from models.first_layers import write_first_layers

# Without any drafting, batches of four were seen to flip at 0.098 (SmolLM2 Q4_1, AVX2).
NEAR_TIE = 0.12
_NAMES = ("Ada", "Bob", "Cleo", "Dan", "Eve", "Finn")
_THINGS = ("lamp", "boat", "apple", "clock", "violin", "stone")


def prompts(n: int) -> list[str]:
    """Chats, stories, code, JSON and copying, in turn."""
    dice = random.Random(7)
    found = []
    for i in range(n):
        name, thing, number = dice.choice(_NAMES), dice.choice(_THINGS), dice.randint(2, 99)
        kind = i % 5
        if kind == 0:
            found.append(
                f"<|im_start|>user\nWhat would {name} do with {number} {thing}s?<|im_end|>\n<|im_start|>assistant\n"
            )
        elif kind == 1:
            found.append(f"Once upon a time {name} found a {thing} that was {number} years old.")
        elif kind == 2:
            code = f"def {thing}_{number}(values):\n    total = {number}\n    for v in values:\n        total += v\n"
            found.append(code * 2)
        elif kind == 3:
            found.append("".join(f'{{"name": "{n}", "{thing}s": {number + j}}}\n' for j, n in enumerate(_NAMES[:3])))
        else:
            text = f"{name} put the {thing} on shelf {number}. Then {name} went home. "
            found.append(f"Repeat this: {text * 3}\nRepeated: {text}")
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    texts, n = prompts(arguments.prompts), arguments.tokens
    path = smollm2()
    alone = backend_type.load(LoadSpec(str(path), n_ctx=1024, n_seq_max=2))
    lines = {f"p{i}": alone.tokenize(t) for i, t in enumerate(texts)}
    plain = {key: isolated(alone, line, n) for key, line in lines.items()}
    alone.close()
    clear = 0
    with tempfile.TemporaryDirectory() as folder:
        small = write_first_layers(path, Path(folder) / "draft.gguf", 6)
        for drafter, draft in (("off", None), ("ngram", None), ("first layers", small)):
            for together in (1, 4):
                engine = speculating(path, draft)
                mode = "off" if drafter == "off" else "auto"
                greedy = Generation(GREEDY, n, ignore_eos=True, cache_prompt=False)
                requests = [Request(k, p, greedy, draft=mode) for k, p in lines.items()]
                got: dict[str, list[int]] = {}
                for start in range(0, len(requests), together):
                    got |= run(engine, *requests[start : start + together]).tokens
                gaps = []
                for key, (tokens, margins) in plain.items():
                    if got[key] != tokens:
                        at = next(i for i in range(n) if got[key][i] != tokens[i])
                        gaps.append(float(margins[at]))
                clear += sum(g > NEAR_TIE for g in gaps) if drafter != "off" else 0
                shot = engine.snapshot()
                print(
                    f"{drafter}, {together} together: {len(lines) - len(gaps)} of {len(lines)} identical, {len(gaps)} parted at a "
                    f"near-tie (largest gap {max(gaps, default=0):.4f}, allowed {NEAR_TIE}); drafted "
                    f"{shot['drafted_tokens']}, accepted {shot['accepted_draft_tokens']}"
                )
                engine.close()
    if clear:
        raise SystemExit(f"{clear} answers parted where the choice was clear")


if __name__ == "__main__":
    main()
