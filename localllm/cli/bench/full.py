"""`localllm bench --full`: a model measured at every depth, beside other streams, with every KV
type, cold, warm and after a restart, each next to what was predicted."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.bench import plot
from localllm.cli.bench import speculation
from localllm.cli.bench.timing import answer, loaded, prompt_of, second_fastest
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.engine.worker.client import WorkerClient, WorkerOptions
    from localllm.load.load_plan import LoadPlan

DEPTHS = (16, 128, 512, 2048, 8192, 32768, 131072)
STREAMS = (1, 2, 4, 8)
KV_TYPES = ("f16", "q8_0", "q4_0")
BATCHES = (64, 256, 1024)
ROUNDS, TOKENS = 3, 48
# KV types and micro-batches differ where there is something to read; and the first token that a
# cache saves is of a prompt.
DEEP, PROMPT = 2048, 1024
# A depth whose prompt would take longer than this to read is left out, and said so.
_MOST_PREFILL_S = 180.0
_SETTLE_S = 1.0


@dataclass
class Sweep:
    """What is measured, one after the other, into `found`. `say` hears each step before it is
    done."""

    load: LoadPlan
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.found: dict[str, Any] = {"left_out": []}
        self._seed = 0

    async def run(self) -> dict[str, Any]:
        """Everything. Raises the LocalLLMError that the model as planned ended in; a variation that
        does not run is told."""
        with tempfile.TemporaryDirectory(prefix="localllm-bench-") as disk:
            options = replace(
                self.load.options,
                engine={**self.load.options.engine, "disk_dir": disk, "draft": "auto"},
            )
            async with loaded(options) as engine:
                await self._depths(engine)
                await self._streams(engine)
                prompt = await self._first_tokens(engine)
                self.say("drafting off and on")
                self.found["speculation"] = await speculation.measure(engine, ROUNDS)
            await self._restart(options, prompt)
        await self._variations()
        return self.found

    def _fresh(self) -> int:
        self._seed += 1
        return self._seed

    async def _depths(self, engine: WorkerClient) -> None:
        """Decode and prefill at each depth that the context has room for; the prompt is read once
        for all rounds."""
        rows: list[dict[str, Any]] = []
        prefill_tok_s = 0.0
        for depth in DEPTHS:
            if depth + TOKENS > engine.info.n_ctx:
                break
            if prefill_tok_s and depth / prefill_tok_s > _MOST_PREFILL_S:
                self.found["left_out"].append(
                    f"depth {depth}: its prompt takes {depth / prefill_tok_s:.0f} s to read"
                )
                break
            self.say(f"depth {depth:,}")
            prompt = prompt_of(engine, self._fresh(), depth)
            runs = [
                await answer(engine, f"depth-{depth}-{i}", prompt, TOKENS, cache=True)
                for i in range(ROUNDS)
            ]
            prefill_tok_s = runs[0].prefill_tok_s
            rate = second_fastest([run.decode_tok_s for run in runs])
            rows.append(
                {
                    "depth": depth,
                    "decode_tok_s": rate,
                    "prefill_tok_s": prefill_tok_s,
                    **self._physics(depth, rate),
                }
            )
        self.found["depths"] = rows

    def _physics(self, depth: int, rate: float) -> dict[str, Any]:
        """What was predicted there, and the bandwidth that this rate means."""
        plan = self.load.plan
        if plan is None:
            return {}
        from localllm.device.detect import detect
        from localllm.planner import decode_cost, speed
        from localllm.planner.streams import streamed

        device, middle = detect(), depth + TOKENS // 2
        parts = streamed(plan.model, plan.variant)
        read = parts.total_bytes + decode_cost.kv_read_bytes(
            plan.model, middle, plan.settings.kv_type
        )
        bandwidth_gbps, _ = decode_cost.bandwidth_of(device)
        achieved = read * rate / 1e9
        return {
            "predicted_tok_s": speed.decode(
                device, plan.model, plan.variant, plan.settings, depth=middle
            ).value,
            "achieved_gbps": achieved,
            "bandwidth_share": achieved / bandwidth_gbps,
        }

    async def _streams(self, engine: WorkerClient) -> None:
        """So many answers at once, together and each."""
        rows = []
        for n in STREAMS:
            if n > engine.info.n_seq_max:
                break
            self.say(f"{n} streams at once")
            rates = []
            for _ in range(ROUNDS):
                prompts = [prompt_of(engine, self._fresh(), 16) for _ in range(n)]
                runs = await asyncio.gather(
                    *(
                        answer(engine, f"stream-{self._seed}-{i}", p, TOKENS)
                        for i, p in enumerate(prompts)
                    )
                )
                rates.append(n * (TOKENS - 1) / max(run.decode_s for run in runs))
            rate = second_fastest(rates)
            rows.append({"streams": n, "together_tok_s": rate, "each_tok_s": rate / n})
        self.found["streams"] = rows

    async def _first_tokens(self, engine: WorkerClient) -> list[int]:
        """The time to a first token: cold, then the same prompt again with a few tokens more."""
        self.say("first token, cold and warm")
        prompt = prompt_of(engine, self._fresh(), min(PROMPT, engine.info.n_ctx // 2))
        cold = await answer(engine, "cold", prompt, 4, cache=True)
        await asyncio.sleep(_SETTLE_S)
        warm = await answer(engine, "warm", [*prompt, *prompt[:8]], 4, cache=True)
        self.found["first_token"] = {
            "prompt_tokens": len(prompt),
            "cold_s": cold.ttft_s,
            "warm_s": warm.ttft_s,
            "warm_known_tokens": warm.cached_tokens,
        }
        await asyncio.sleep(_SETTLE_S)
        return prompt

    async def _restart(self, options: WorkerOptions, prompt: list[int]) -> None:
        """The same prompt in a new process: what the disk tier brings back."""
        self.say("first token after a restart, from disk")
        async with loaded(options) as engine:
            await answer(engine, "awake", prompt_of(engine, self._fresh(), 16), 4)
            again = await answer(engine, "restarted", [*prompt, *prompt[:8]], 4, cache=True)
            kept = await engine.snapshot()
        self.found["first_token"] |= {
            "restart_s": again.ttft_s,
            "restart_known_tokens": again.cached_tokens,
        }
        self.found["disk"] = {
            k: v for k, v in kept.items() if k.startswith("disk_") and isinstance(v, (int, float))
        }

    async def _variations(self) -> None:
        """KV types and micro-batches other than planned, each in a load of its own."""
        sizes = sorted({n for n in (*BATCHES, self.load.options.spec.n_batch) if n})
        kv_types = [
            (f"KV {kind}", {"kv_type": kind}, {"kv_type_k": kind, "kv_type_v": kind})
            for kind in KV_TYPES
        ]
        micro_batches = [(f"micro-batches of {n}", {"tokens": n}, {"n_batch": n}) for n in sizes]
        for title, variations in (("kv_types", kv_types), ("micro_batches", micro_batches)):
            rows = [await self._variation(name, key, changed) for name, key, changed in variations]
            self.found[title] = [row for row in rows if row is not None]

    async def _variation(
        self, name: str, key: dict[str, Any], changed: dict[str, Any]
    ) -> dict[str, Any] | None:
        self.say(name)
        options = replace(
            self.load.options,
            spec=replace(self.load.options.spec, **changed),
            engine={**self.load.options.engine, "disk_dir": None, "draft": "off"},
        )
        try:
            async with loaded(options) as engine:
                n = min(DEEP, engine.info.n_ctx // 2)
                prompt = prompt_of(engine, self._fresh(), n)
                runs = [
                    await answer(engine, f"{i}", prompt, TOKENS, cache=True) for i in range(ROUNDS)
                ]
                return key | {
                    "depth": n,
                    "decode_tok_s": second_fastest([run.decode_tok_s for run in runs]),
                    "prefill_tok_s": runs[0].prefill_tok_s,
                    "memory_bytes": engine.memory.total_bytes,
                }
        except LocalLLMError as e:
            self.found["left_out"].append(f"{name}: {e.message}")
            return None


def table(found: dict[str, Any]) -> list[str]:
    """The figures as lines of at most 80 columns, and the picture."""
    points = [
        plot.PlotPoint(r["depth"], r["decode_tok_s"], r.get("predicted_tok_s"))
        for r in found["depths"]
    ]
    said = [
        "",
        *plot.lines(points),
        "",
        f"{'depth':>8}{'decode':>10}{'predicted':>11}{'prefill':>10}{'memory read':>20}",
    ]
    for r in found["depths"]:
        predicted = f"{r['predicted_tok_s']:.1f}" if "predicted_tok_s" in r else "unknown"
        read = f"{r['achieved_gbps']:.1f} GB/s" if "achieved_gbps" in r else "unknown"
        share = f" ({r['bandwidth_share']:.0%})" if r.get("bandwidth_share") else ""
        said.append(
            f"{r['depth']:>8,}{r['decode_tok_s']:>10.1f}{predicted:>11}{r['prefill_tok_s']:>10.1f}{read + share:>20}"
        )
    said += ["", f"{'streams':>8}{'together':>10}{'each':>9} tok/s"]
    said += [
        f"{r['streams']:>8}{r['together_tok_s']:>10.1f}{r['each_tok_s']:>9.1f}"
        for r in found["streams"]
    ]
    for title, key, name in (
        ("KV type", "kv_types", "kv_type"),
        ("micro-batch", "micro_batches", "tokens"),
    ):
        said += ["", f"{title:>12}{'decode':>9}{'prefill':>9} tok/s{'memory':>10}"]
        said += [
            f"{r[name]:>12}{r['decode_tok_s']:>9.1f}{r['prefill_tok_s']:>9.1f}{r['memory_bytes'] / 1e9:>13.2f} GB"
            for r in found[key]
        ]
    first = found["first_token"]
    said += [
        "",
        f"first token of a prompt of {first['prompt_tokens']:,}",
        f"{'cold':>12}{first['cold_s']:9.3f} s",
        f"{'warm':>12}{first['warm_s']:9.3f} s   {first['warm_known_tokens']:,} tokens were known",
        f"{'restarted':>12}{first['restart_s']:9.3f} s   {first['restart_known_tokens']:,} from "
        "disk",
    ]
    return [*said, *(f"left out: {text}" for text in found["left_out"])]
