"""JSON schemas in bulk: guidance-ai/jsonschemabench (MaskBench), compared with plain llguidance.

    python -m benchmarks.schemas PATH [--sample N]

Each schema is used as an answer's form and as a tool's parameters, with its valid and invalid
instances, and with plain llguidance in the same run. PATH is the repository, or its folder
maskbench/data. Every schema is treated as strict: enforced completely, or rejected with the
keyword's name. Members come in the schema's order, as in plain llguidance. MaskBench's authors
sorted the instances of the schemas that it accepted. Instances of schemas that only we accept may
have another order, and are then rejected.

"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from localllm.conversation.tools.base import parameters_of
from localllm.conversation.tools.schemas import constrainable, one_call
from localllm.errors import UnsupportedError
from localllm.grammars.json_schema import SPACE, schemas_in


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), eos_token=[256])


def answer(schema: Any) -> str:
    """Return the grammar of an answer in this form. Raises UnsupportedError."""
    return LLMatcher.grammar_from_lark(schemas_in(f"start: %json {json.dumps(schema)}\n"))


def call(schema: Any) -> str:
    """Return the grammar of a call of a strict tool with these parameters. Raises
    UnsupportedError."""
    kept, _ = constrainable(
        [{"type": "function", "function": {"name": "f", "parameters": schema}, "strict": True}]
    )
    return LLMatcher.grammar_from_lark(
        schemas_in(f"start: %json {one_call([parameters_of(t) for t in kept])[1]}\n")
    )


def plain(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_pattern": SPACE}
    )


PATHS = {"answer": answer, "call": call, "plain llguidance": plain}


def allows(matcher: LLMatcher, text: str) -> bool:
    state = matcher.deep_copy()
    data = list(text.encode())
    return state.try_consume_tokens(data) == len(data) and state.is_accepting()


def matcher_of(path: Any, schema: Any, why: Counter[str]) -> LLMatcher | None:
    """Return a matcher of the schema. If it is rejected, count the reason and return None."""
    try:
        matcher = LLMatcher(TOKENIZER, path(schema), log_level=0)
        reason = matcher.get_error().splitlines()[0] if matcher.is_error() else ""
    except (UnsupportedError, ValueError) as e:
        reason = str(e)
    if not reason:
        return matcher
    why[reason.partition("enforced: ")[2][:60] or reason[:60]] += 1
    return None


def files(path: Path) -> list[Path]:
    inner = path / "maskbench" / "data"
    return sorted((inner if inner.is_dir() else path).glob("*.json"))


def measure(found: list[Path]) -> Iterator[tuple[str, Counter[str], list[float], Counter[str]]]:
    for name, path in PATHS.items():
        counts: Counter[str] = Counter()
        why: Counter[str] = Counter()
        spent: list[float] = []
        for file in found:
            case = json.loads(file.read_text())
            schema, tests = case["schema"], case["tests"]
            kind = schema.get("type", "object") if isinstance(schema, dict) else ""
            if name == "call" and (
                "object" not in kind or not any(isinstance(t["data"], dict) for t in tests)
            ):
                continue  # arguments must be an object
            counts["schemas"] += 1
            began = time.perf_counter()
            matcher = matcher_of(path, schema, why)
            spent.append(time.perf_counter() - began)
            if matcher is None:
                counts["refused"] += 1
                continue
            for test in tests:
                if name == "call" and not isinstance(test["data"], dict):
                    continue
                kind = "valid" if test["valid"] else "invalid"
                counts[kind] += 1
                for shape, indent in (("", None), (" indented", 2)):
                    said = json.dumps(test["data"], ensure_ascii=False, indent=indent)
                    said = f'{{"name": "f", "arguments": {said}}}' if name == "call" else said
                    if allows(matcher, said) == test["valid"]:
                        continue
                    counts[f"{kind} {'rejected' if test['valid'] else 'accepted'}{shape}"] += 1
        yield name, counts, sorted(spent), why


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--sample", type=int, default=0, help="so many schemas, drawn with a fixed seed; 0 = all"
    )
    options = parser.parse_args()
    found = files(options.path)
    if not found:
        parser.error(
            f"no schemas in {options.path}: clone guidance-ai/jsonschemabench and name its folder"
        )
    if options.sample:
        found = random.Random(0).sample(found, min(options.sample, len(found)))
    for name, counts, spent, why in measure(found):
        share = 100 * counts["refused"] / max(1, counts["schemas"])
        print(f"{name}: {dict(counts)}; refused {share:.1f} %")
        at = [spent[min(len(spent) - 1, int(len(spent) * part))] * 1e3 for part in (0.5, 0.99, 1.0)]
        print(f"  compiled in ms: p50 {at[0]:.1f}, p99 {at[1]:.1f}, longest {at[2]:.0f}")
        print("  " + "; ".join(f"{n} {reason}" for reason, n in why.most_common(12)), flush=True)


if __name__ == "__main__":
    main()
