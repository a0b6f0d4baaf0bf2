"""The bytes that a token reads and the bandwidth that an answer used, from the server's figures;
and the panel that shows them."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.foreign_json import JsonPart, MalformedError
from localllm.formatting import gb, mb
from localllm_tui.control.formatting import bar
from localllm_tui.control.stream_events import (
    AnswerTimings,
    AnswerUsage,
)
from localllm_tui.control.terminal import printable


@dataclass(frozen=True, slots=True)
class ModelPhysics:
    """A served model on its machine, from the `physics` of /v1/models
    (localllm/planner/serialise.py). `kv_points`: (depth, bytes read); `planned_tok_s`: the planned
    decoding speed, its least and its most; `power`: the share of the time in which the model
    computes; `bandwidth_basis`: the source of the bandwidth."""

    bandwidth_gbps: float
    dense_bytes: int
    routed_bytes: int
    kv_points: tuple[tuple[int, int], ...]
    planned_tok_s: tuple[float, float, float]
    kv_type: str = ""
    quant: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)
    power: float = 1.0
    bandwidth_basis: str = ""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> ModelPhysics | None:
        """Parse the server's JSON; None if it is missing or different."""
        try:
            return _physics(JsonPart(answer, "physics"))
        except MalformedError:
            return None

    def kv_bytes(self, depth: float) -> float:
        points = self.kv_points
        if not points or depth <= 0:
            return 0.0
        for (d0, b0), (d1, b1) in itertools.pairwise(points):
            if depth <= d1:
                return b0 + (b1 - b0) * (depth - d0) / max(1, d1 - d0)
        return float(points[-1][1])

    def token_bytes(self, depth: float) -> float:
        """Bytes that decoding one token reads at a context of `depth` tokens."""
        return self.dense_bytes + self.routed_bytes + self.kv_bytes(depth)

    def limit_tok_s(self, depth: float) -> float:
        """Tokens per second at full memory bandwidth, without drafting."""
        return self.bandwidth_gbps * 1e9 / max(1.0, self.token_bytes(depth))


def _physics(reported: JsonPart) -> ModelPhysics:
    """Raises MalformedError if a required figure is missing."""
    weights = reported.get("weights")
    plan = reported.get("decode_tok_s")
    points = tuple(_point(pair) for pair in reported.get("kv_read_bytes").items())
    planned = (_required(plan, "value"), _required(plan, "low"), _required(plan, "high"))
    power = reported.get("power").number()
    return ModelPhysics(
        _required(reported, "bandwidth_gbps"),
        int(_required(weights, "dense_bytes")),
        int(_required(weights, "routed_bytes")),
        points,
        planned,
        reported.get("kv_type").text(),
        reported.get("quant").text(),
        reported.get("memory").members(),
        1.0 if power is None else power,
        reported.get("bandwidth_basis").text(),
    )


def _point(pair: JsonPart) -> tuple[int, int]:
    depth, read, *rest = [*(part.count() for part in pair.items()), None, None]
    if depth is None or read is None or len(rest) != 2:
        raise pair.wrong("a pair of counts")
    return depth, read


def _required(table: JsonPart, name: str) -> float:
    found = table.get(name).number()
    if found is None or found < 0:
        raise table.get(name).wrong("a figure")
    return float(found)


@dataclass(frozen=True, slots=True)
class AnswerSpeed:
    """An answer's speed as the server measured it, or as it streams (`live`: tokens per second as
    they arrive, None: measured).

    `coming`: it is still streaming. For a stopped answer the server sends no timings. `ttft_s` and
    `took_s` are by the chat's clock: until the first token, and until the last."""

    usage: AnswerUsage = field(default_factory=AnswerUsage)
    timings: AnswerTimings = field(default_factory=AnswerTimings)
    cache_miss: str = ""
    live: float | None = None
    coming: bool = False
    ttft_s: float | None = None
    took_s: float | None = None

    @property
    def seen_arriving(self) -> bool:
        """True if the server sent no timings, so only the chat's clock is known."""
        if self.live is not None or self.coming:
            return True
        return self.ttft_s is not None and self.timings == AnswerTimings()

    @property
    def depth(self) -> float:
        """Mean context length of the answer's tokens."""
        return self.usage.prompt + self.usage.completion / 2

    @property
    def tok_s(self) -> float | None:
        if self.live is not None:
            return self.live
        n_tokens = self.usage.completion - 1
        if self.timings.decode_s > 0 and n_tokens > 0:
            return n_tokens / self.timings.decode_s
        return None

    def achieved_gbps(self, physics: ModelPhysics) -> float | None:
        """Memory bandwidth its decode steps used, in GB/s, counted for this answer alone."""
        took = self.timings
        rate = self.live
        if rate is None and took.decode_s > 0 and took.steps:
            rate = took.steps / took.decode_s
        if rate is None:
            return None
        return rate * physics.token_bytes(self.depth) / 1e9


def memory_size(n_bytes: float) -> str:
    """Bytes in GB, or in MB below one, in three figures or so."""
    if n_bytes >= 1e9:
        return gb(n_bytes, 2)
    if n_bytes >= 1e7:
        return mb(n_bytes, 0)
    return mb(n_bytes, 2)


def bars(values: Sequence[float], cells: int) -> list[str]:
    """Bars of at most `cells` in proportion to `values`; any value above 0 shows."""
    maximum = max(values, default=0.0)
    drawn = []
    for value in values:
        length = 0
        if value > 0:
            length = max(1, round(cells * value / maximum))
        drawn.append("█" * length)
    return drawn


PANEL_WIDTH = 38
_BAR = 12


def panel_lines(
    physics: ModelPhysics | None,
    speed: AnswerSpeed | None,
    *,
    loading: str = "",
) -> list[str]:
    """The panel's lines; `loading`: how far the model is that will have figures."""
    if loading:
        return textwrap.wrap(
            f"Still {printable(loading)}. The cost of a token is known after that.", PANEL_WIDTH
        )
    if physics is None:
        return [*_by_our_clock(speed), "This server does not report", "the cost of a token."]
    speed = speed or AnswerSpeed()
    blocks = [_answer(physics, speed), _bandwidth(physics, speed), _token(physics, speed)]
    blocks += [_prompt(speed), _time(speed), _memory(physics.memory)]
    texts = ["\n".join(lines) for lines in blocks]
    joined = "\n\n".join(text for text in texts if text)
    return [line[:PANEL_WIDTH] for line in joined.split("\n")]


def _by_our_clock(speed: AnswerSpeed | None) -> Iterator[str]:
    """An answer of a server that sends no figures of its machine: only measured and reported
    figures."""
    if speed is None or speed.ttft_s is None:
        return
    yield "THIS ANSWER, by the chat's clock"
    if speed.tok_s is not None:
        yield f"  speed        {speed.tok_s:>8.1f} tok/s"
    yield f"  first token  {speed.ttft_s:>8.2f} s"
    if speed.took_s is not None:
        name = "so far" if speed.coming else "whole answer"
        yield f"  {name:<12} {speed.took_s:>8.2f} s"
    yield ""
    if speed.usage.prompt and not speed.coming:
        yield f"PROMPT {speed.usage.prompt:,} tokens"
        if speed.usage.cached is not None:
            yield f"  {speed.usage.cached:,} from cache"
        yield ""


def _answer(physics: ModelPhysics, speed: AnswerSpeed) -> Iterator[str]:
    if not speed.seen_arriving:
        yield "THIS ANSWER"
    elif speed.coming:
        yield "THIS ANSWER, as it arrives"
    else:
        yield "THIS ANSWER, as it arrived"
    rate = speed.tok_s
    if rate is None:
        yield "  nothing measured yet"
    elif speed.coming:
        yield f"  now      {rate:>8.1f} tok/s"
    else:
        yield f"  was      {rate:>8.1f} tok/s"
    planned, low, high = physics.planned_tok_s
    yield f"  planned  {planned:>8.1f}  ({low:.0f} to {high:.0f})"
    as_planned = rate is None or low <= rate <= high
    if physics.bandwidth_basis == "assumed" and not as_planned:
        yield "  the plan's bandwidth is assumed:"
        yield "  `localllm device --measure` measures it"
    if physics.power < 1:
        yield f"  power    {physics.power:>8.0%} of the time"


def _bandwidth(physics: ModelPhysics, speed: AnswerSpeed) -> Iterator[str]:
    """The share of the memory's bandwidth that the answer used, as one bar."""
    achieved = speed.achieved_gbps(physics)
    roof = physics.bandwidth_gbps
    if achieved is None or roof <= 0:
        yield f"BANDWIDTH {roof:,.0f} GB/s"
    else:
        digits = 0 if achieved >= 10 else 1
        yield f"BANDWIDTH {achieved:.{digits}f} of {roof:,.{digits}f} GB/s: {achieved / roof:.0%}"
        used_mbps = round(min(achieved, roof) * 1e3)  # drafts and caches may exceed the roof
        yield f"  {bar(used_mbps, max(1, round(roof * 1e3)), PANEL_WIDTH - 2)}"
    yield f"  roof     {physics.limit_tok_s(speed.depth):>8.1f} tok/s undrafted"


def _token(physics: ModelPhysics, speed: AnswerSpeed) -> Iterator[str]:
    read: dict[str, float] = {}
    if physics.dense_bytes:
        read["weights"] = physics.dense_bytes
    if physics.routed_bytes:
        read["experts"] = physics.routed_bytes
    read["KV cache"] = physics.kv_bytes(speed.depth)
    yield f"EACH TOKEN READS {memory_size(physics.token_bytes(speed.depth))}"
    for (name, n), drawn in zip(read.items(), bars([*read.values()], _BAR), strict=True):
        yield f"  {name:<9}{memory_size(n):>9}  {drawn}"
    yield f"  {physics.quant} weights, {physics.kv_type} KV, {speed.depth:,.0f} deep"


def _prompt(speed: AnswerSpeed) -> Iterator[str]:
    """The part of this turn's prompt that came from the prefix cache, and the speed of the rest."""
    took = speed.timings
    usage = speed.usage
    if speed.seen_arriving or not usage.prompt:
        return
    if usage.cached is None:
        yield f"PROMPT {usage.prompt:,} tokens"
    else:
        yield f"PROMPT {usage.cached:,} of {usage.prompt:,} from cache"
        yield f"  {bar(usage.cached, usage.prompt, PANEL_WIDTH - 2)}"
    if took.prefill_s > 0 and took.prefilled > 1:
        yield f"  the rest at {took.prefilled / took.prefill_s:,.0f} tok/s"
    if speed.cache_miss:
        note = printable(f"not more: {speed.cache_miss}")
        yield textwrap.fill(note, PANEL_WIDTH - 3, initial_indent="  ", subsequent_indent="    ")


def _time(speed: AnswerSpeed) -> Iterator[str]:
    took = speed.timings
    yield "TIME"
    if speed.seen_arriving and not speed.coming:
        yield "  not known for a stopped answer"
    elif speed.coming or not speed.usage.prompt:
        yield "  known when the answer is complete"
    else:
        drawn = bars([took.queued_s, took.prefill_s, took.decode_s], _BAR)
        yield f"  queued   {took.queued_s:>7.2f} s  {drawn[0]}"
        yield f"  prefill  {took.prefill_s:>7.2f} s  {drawn[1]}"
        yield f"  decode   {took.decode_s:>7.2f} s  {drawn[2]}"
        if took.drafted:
            yield f"  drafts: {took.accepted:,} of {took.drafted:,} accepted"


def _memory(needs: Mapping[str, Any]) -> Iterator[str]:
    def size(name: str) -> float:
        return max(0.0, JsonPart(needs).get(name).number() or 0.0)

    total = size("total_bytes")
    limit = size("limit_bytes")
    if not total:
        return
    weights = size("weights_bytes")
    kv = size("kv_bytes")
    if limit:
        yield f"MEMORY {memory_size(total)} of {memory_size(limit)}"
        yield f"  {bar(round(total), round(limit), PANEL_WIDTH - 2)}"
    else:
        yield f"MEMORY {memory_size(total)}"
    yield f"  weights {memory_size(weights)}, KV {memory_size(kv)}"
    yield f"  buffers and state {memory_size(total - weights - kv)}"
