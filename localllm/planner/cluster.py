"""Plan a model whose layers are on several machines. Pure.

Computes how many layers each machine gets, the cost of sending a token between them, and whether
one machine would be faster.

The machines compute their layers one after another. For one stream, a second machine therefore adds
memory, but decoding is never faster than on the fastest machine alone. (Tensor parallelism splits
each layer and can be faster: see SharedPlan below. llama.cpp's RPC does not do that.) All machines
can read different parts of a prompt at the same time if the engine supports it. llama.cpp's RPC
does not promise to, so the lower end of the range assumes one after another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from localllm.device.types import Device
from localllm.planner import decode_cost, layer_bytes, memory, speed
from localllm.planner.bytes_per_token import streamed
from localllm.planner.types import Range, RunSettings, backend_of
from localllm_catalog.types import Model, Variant

_F32_BYTES = 4
_PROMPT_TOKENS = 2048
# Time that llama.cpp's RPC adds to each token for each further machine, without the link: best,
# typical, worst. From published differences between one machine and several with the same file
# (benchmarks/data/clusters.csv). They are the same over 1 Gbit/s Ethernet as over 200 Gbit/s. The
# worst of the few pairs was 7.7 ms. With 12 ms, the range holds four fifths of the published
# figures for two machines. With 10 ms it no longer does, since ranges for single machines became
# narrower.
RPC_S = (0.0, 5.5e-3, 12e-3)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two machines: bytes per second that arrive, and the seconds of one message
    (best, worst). `source` covers both."""

    name: str
    bytes_per_s: float
    latency_s: tuple[float, float]
    source: str


LINKS = {
    "1gbe": Link(
        "1 Gbit/s Ethernet",
        0.117e9,
        (100e-6, 500e-6),
        "nominal rate less framing; TCP's latency assumed",
    ),
    "2.5gbe": Link(
        "2.5 Gbit/s Ethernet",
        0.29e9,
        (100e-6, 500e-6),
        "nominal rate less framing; TCP's latency assumed",
    ),
    "10gbe": Link(
        "10 Gbit/s Ethernet",
        1.1e9,
        (50e-6, 300e-6),
        "nominal rate less framing; TCP's latency assumed",
    ),
    "thunderbolt5": Link(
        "Thunderbolt 5",
        6e9,
        (5e-6, 300e-6),
        "80 Gbit/s nominal; 5-9 µs (aiexpert.news) to < 50 µs with RDMA and 300 µs without "
        "(jeffgeerling.com, 2025)",
    ),
    "connectx7": Link(
        "ConnectX-7, 200 Gbit/s",
        11e9,
        (5e-6, 100e-6),
        "96 Gbit/s by iperf3 over one cable (wisp.net.au); RDMA's and TCP's latency assumed",
    ),
}


@dataclass(frozen=True, slots=True)
class Share:
    """One machine's part: its layers, and the bytes there (weights, KV and buffers) out of those
    available to models."""

    device: Device
    n_layers: int
    needs_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A plan for a model on several machines. `alone` is a machine that runs it at least as fast by
    itself (None: no machine)."""

    settings: RunSettings
    link: Link
    shares: tuple[Share, ...]
    transfer_bytes: int
    transfer_s: tuple[float, float]
    rpc_s: float
    decode_tok_s: Range
    prefill_tok_s: Range
    alone: Device | None

    @property
    def needs_bytes(self) -> int:
        """The bytes on all machines."""
        return sum(share.needs_bytes for share in self.shares)

    @property
    def advice(self) -> str:
        """Advice to the user, in a sentence or two."""
        if self.alone is not None:
            return (
                f"{self.alone.name} alone runs it at least as fast: join machines for models that "
                "fit on none of them, or use `serve --pool` with a copy on each for more requests"
            )
        used_shares = [share for share in self.shares if share.n_layers]
        if len(used_shares) == 1:
            return f"all of it is on {used_shares[0].device.name}"
        # In the order of `--split`: first the workers, then the serving machine.
        split = ",".join(str(share.n_layers) for share in (*used_shares[1:], used_shares[0]))
        waiting_share = (sum(self.transfer_s) / 2 + self.rpc_s) * self.decode_tok_s.value
        workers = " and ".join(share.device.name for share in used_shares[1:])
        return (
            "it fits on none of them alone. RPC and the network take about "
            f"{waiting_share:.0%} of a "
            "token's time. "
            f"`localllm worker` on {workers}, "
            f"`serve --with HOST:PORT --split {split}` on {used_shares[0].device.name}"
        )


def layers_bytes(model: Model, variant: Variant, settings: RunSettings) -> list[int]:
    """Return the bytes of each layer: weights, KV and state."""
    return [sum(of_all) for of_all in memory.layer_ledger(model, variant, settings).layers]


def divide(
    model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device]
) -> tuple[Share, ...] | None:
    """Split the layers: as many as fit on the machine that is fastest with this model, the rest on
    the next, and so on.

    Equal machines get equal parts, so that each has room for more context. Returns None if the
    machines cannot hold all layers.
    """
    remaining_layers = layers_bytes(model, variant, settings)
    parts_of_model = layer_bytes.parts(model, variant)

    def rate(device: Device) -> float:
        return speed.decode(device, model, variant, settings).value

    order = sorted(devices, key=rate, reverse=True)
    are_equal = len({d.name for d in devices}) == 1
    shares = []
    for position, device in enumerate(order):
        fixed_bytes = memory.overhead_bytes(device) + memory.compute_bytes(model, settings)
        if position == 0:
            fixed_bytes += parts_of_model.input_bytes + parts_of_model.own_output_bytes
        max_layers = len(remaining_layers)
        if are_equal:
            max_layers = -(-len(remaining_layers) // (len(order) - position))
        cumulative_bytes = [
            fixed_bytes + n_bytes for n_bytes in accumulate(remaining_layers[:max_layers])
        ]
        n_layers = bisect_right(cumulative_bytes, device.usable_bytes)
        shares.append(
            Share(
                device,
                n_layers,
                cumulative_bytes[n_layers - 1] if n_layers else 0,
                device.usable_bytes,
            )
        )
        remaining_layers = remaining_layers[n_layers:]
    if remaining_layers:
        return None
    return tuple(shares)


def plan(
    model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device], link: Link
) -> ClusterPlan | None:
    """Return the plan of `model` on `devices` joined by `link`, or None if it does not fit."""
    shares = divide(model, variant, settings, devices)
    if shares is None:
        return None
    used_shares = [s for s in shares if s.n_layers]
    carried_bytes, *transfer_s = _transfer(model, used_shares, link)
    decode = decode_over(model, variant, settings, used_shares, link)
    prefill = prefill_over(model, variant, settings, used_shares, link)
    alone = None
    fastest = 0.0
    for device in devices:
        if divide(model, variant, settings, [device]) is not None:
            rate = speed.decode(device, model, variant, settings).value
            if rate > fastest:
                fastest = rate
                alone = device
    if fastest < decode.value:
        alone = None
    return ClusterPlan(
        settings,
        link,
        shares,
        carried_bytes,
        (transfer_s[0], transfer_s[1]),
        RPC_S[1] * (len(used_shares) - 1),
        decode,
        prefill,
        alone,
    )


def _transfer(model: Model, shares: Sequence[Share], link: Link) -> tuple[int, float, float]:
    """Return the bytes of a token that cross the link, and the best and worst seconds for that.

    The hidden vector goes to each further machine, and back to the first, which has the output.
    """
    hops = 0
    if len(shares) > 1:
        hops = len(shares)
    n_bytes = hops * model.hidden_size * _F32_BYTES
    best_s, worst_s = (n_bytes / link.bytes_per_s + hops * latency for latency in link.latency_s)
    return n_bytes, best_s, worst_s


def _token_s(shares: Sequence[Share], rates: Sequence[float]) -> float:
    """Return the seconds of a token whose layers are computed one share after another. `rates` are
    tokens/s of the whole model on each machine."""
    n_layers = sum(s.n_layers for s in shares)
    return sum(s.n_layers / n_layers / rate for s, rate in zip(shares, rates, strict=True))


def decode_over(
    model: Model,
    variant: Variant,
    settings: RunSettings,
    shares: Sequence[Share],
    link: Link,
    *,
    depth: int = 0,
) -> Range:
    """Return the tokens/s of one stream at `depth` with these shares."""
    predictions = [speed.decode(s.device, model, variant, settings, depth=depth) for s in shares]
    _, *transfer = _transfer(model, shares, link)
    best_s, typical_s, worst_s = (cost * (len(shares) - 1) for cost in RPC_S)
    basis = (
        f"each machine's own prediction ({predictions[0].basis}), one after another; "
        f"RPC's {typical_s * 1e3:.1f} ms a token ({best_s * 1e3:.0f}-{worst_s * 1e3:.1f}) "
        f"from published pairs; {link.source}"
    )
    token_s = _token_s(shares, [prediction.value for prediction in predictions])
    longest_s = _token_s(shares, [prediction.low for prediction in predictions])
    shortest_s = _token_s(shares, [prediction.high for prediction in predictions])
    return Range(
        1 / (token_s + sum(transfer) / 2 + typical_s),
        1 / (longest_s + transfer[1] + worst_s),
        1 / (shortest_s + transfer[0] + best_s),
        basis,
    )


def prefill_over(
    model: Model,
    variant: Variant,
    settings: RunSettings,
    shares: Sequence[Share],
    link: Link,
    *,
    prompt_tokens: int = _PROMPT_TOKENS,
    depth: int = 0,
) -> Range:
    """Return the tokens/s of a prompt with `prompt_tokens` after `depth` tokens, with these
    shares."""
    predictions = [
        speed.prefill(s.device, model, variant, settings, prompt_tokens=prompt_tokens, depth=depth)
        for s in shares
    ]
    # Seconds per prompt token. The latency is per batch and left out.
    transfer_s = _transfer(model, shares, link)[0] / link.bytes_per_s
    n_layers = sum(s.n_layers for s in shares)
    slowest_s = max(
        s.n_layers / n_layers / prediction.value
        for s, prediction in zip(shares, predictions, strict=True)
    )
    serial_tok_s = 1 / (
        _token_s(shares, [prediction.value for prediction in predictions]) + transfer_s
    )
    return Range(
        serial_tok_s,
        1 / (_token_s(shares, [prediction.low for prediction in predictions]) + transfer_s),
        max(serial_tok_s, 1 / max(slowest_s, transfer_s)),
        "one machine after another; at best all at the "
        "same time, each on a different part of the prompt",
    )


# Model families that mlx-lm 0.32 can shard (`shard` in mlx_lm/models).
FAMILIES = frozenset((
    "deepseek-r1-distill", "glm", "gpt-oss", "llama-3", "minimax", "qwen2.5-coder", "qwen3",
    "qwen3-coder", "qwen3.5",
    "qwen3.6", "qwen3.8",
))  # fmt: skip
# One all-reduce after attention and one after the feed-forward.
_ALL_REDUCES_PER_LAYER = 2
_F16_BYTES = 2
# With RDMA (JACCL). Otherwise a message takes the link's own latency.
_RDMA_S = (5e-6, 50e-6)


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A share of each layer on each machine (tensor parallelism, as in MLX).

    A token's time with n machines starts from its time on one machine. It is shorter by (n-1)/n of
    the time to read the bytes at nominal bandwidth, and longer by two all-reduces a layer. No
    constant is fitted to published rows; `python -m benchmarks.planner_fit.clusters` compares.

    - `needs_bytes`: the need of each machine.
    - `limit_bytes`: the bytes for models on the smallest machine.
    - `alone_tok_s`: the speed of the slowest machine by itself, even if the model does not fit
      there.
    """

    settings: RunSettings
    devices: tuple[Device, ...]
    needs_bytes: int
    limit_bytes: int
    decode_tok_s: Range
    prefill_tok_s: Range
    alone_tok_s: float


def why_not(model: Model, variant: Variant, devices: Sequence[Device]) -> str:
    """Return why `devices` cannot share `variant`, or "" if they can."""
    n_machines = len(devices)
    backend = backend_of(variant)
    can_run = backend.tensor_parallel and all(backend.runs_on(d.accelerator) for d in devices)
    head_counts = {model.n_heads}
    for layer in model.layers:
        head_counts.update(layer.mixer.head_counts)
    if not can_run:
        return "only Macs can share a model with MLX, and it must be an MLX model"
    if model.family not in FAMILIES:
        return f"mlx-lm has no tensor-parallel version of {model.family}"
    indivisible = min((h for h in head_counts if h % n_machines), default=0)
    if indivisible:
        return f"{n_machines} machines can't divide {indivisible} heads evenly"
    return ""


def needs_bytes(
    model: Model, variant: Variant, settings: RunSettings, device: Device, n_machines: int
) -> int:
    """Return the bytes on each of `n_machines` machines.

    Each holds its share of the layers and their KV, and all of the embedding and output.
    """
    parts = layer_bytes.parts(model, variant)
    embedding_bytes = parts.input_bytes + parts.own_output_bytes
    fixed_bytes = memory.overhead_bytes(device) + memory.compute_bytes(model, settings)
    return (
        -(-sum(layers_bytes(model, variant, settings)) // n_machines)
        + embedding_bytes
        + fixed_bytes
    )


def tensor_parallel_plan(
    model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device], link: Link
) -> SharedPlan | None:
    """Return the plan of `model` shared by `devices` over `link`, or None if it does not fit."""
    needed_bytes = max(needs_bytes(model, variant, settings, d, len(devices)) for d in devices)
    limit_bytes = min(d.usable_bytes for d in devices)
    if needed_bytes > limit_bytes:
        return None
    alone_tok_s = min(speed.decode(d, model, variant, settings).value for d in devices)
    decode = tensor_parallel_decode(model, variant, settings, devices, link)
    prefill = tensor_parallel_prefill(model, variant, settings, devices, link)
    return SharedPlan(
        settings, tuple(devices), needed_bytes, limit_bytes, decode, prefill, alone_tok_s
    )


def tensor_parallel_decode(
    model: Model,
    variant: Variant,
    settings: RunSettings,
    devices: Sequence[Device],
    link: Link,
    *,
    depth: int = 0,
) -> Range:
    """Return the tokens/s of one stream at `depth`. All machines wait for the slowest."""
    n_machines = len(devices)
    predictions = [
        speed.decode(device, model, variant, settings, depth=depth) for device in devices
    ]
    slowest_alone = min(predictions, key=attrgetter("value"))
    slowest = devices[predictions.index(slowest_alone)]
    read_bytes = streamed(model, variant).total_bytes
    read_bytes += decode_cost.kv_read_bytes(model, depth, settings.kv_type)
    saved_s = (1 - 1 / n_machines) * read_bytes / (slowest.bandwidth_gbps.value * 1e9)
    # The time of the all-reduces, at best and at worst.
    messages_s = link.latency_s
    if link.name == "Thunderbolt 5":
        messages_s = _RDMA_S
    best_s, worst_s = (_ALL_REDUCES_PER_LAYER * len(model.layers) * s for s in messages_s)
    typical_s = (best_s * worst_s) ** 0.5

    def shared(rate: float, messages_s: float) -> float:
        """Return the rate with the reading divided and `messages_s` added."""
        return 1 / (1 / rate - min(saved_s, (1 - 1 / n_machines) / rate) + messages_s)

    max_tok_s = n_machines * slowest_alone.high
    value = min(shared(slowest_alone.value, typical_s), max_tok_s)
    low = shared(slowest_alone.low, worst_s)
    high = min(shared(slowest_alone.high, best_s), max_tok_s)
    basis = (
        f"one {slowest.name} ({slowest_alone.basis}), with the time to read its "
        f"bytes divided by {n_machines}; "
        f"{link.source}"
    )
    return Range(value, min(low, value), max(high, value), basis)


def tensor_parallel_prefill(
    model: Model, variant: Variant, settings: RunSettings, devices: Sequence[Device], link: Link
) -> Range:
    """Return the tokens/s of a prompt. The arithmetic is divided, and each vector crosses the link
    twice a layer."""
    n_machines = len(devices)
    predictions = [
        speed.prefill(d, model, variant, settings, prompt_tokens=_PROMPT_TOKENS) for d in devices
    ]
    slowest = min(predictions, key=attrgetter("value"))
    reduced_bytes = _ALL_REDUCES_PER_LAYER * len(model.layers) * model.hidden_size * _F16_BYTES
    transfer_s = reduced_bytes * (n_machines - 1) / n_machines / link.bytes_per_s
    value = 1 / (1 / slowest.value / n_machines + transfer_s)
    low = 1 / (1 / slowest.low + transfer_s)
    high = n_machines * slowest.high
    return Range(
        value,
        min(low, value),
        max(high, value),
        "its arithmetic divided by the machines; at worst no gain",
    )
