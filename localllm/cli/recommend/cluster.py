"""Several machines joined by a link: plan one model over them, or list the models that need them
all, as text or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from localllm.cli.recommend import joined_view
from localllm.cli.recommend.joined_view import JoinedAnswer
from localllm.device.name_lookup import resolve
from localllm.device.types import Device, DeviceNotFoundError
from localllm.errors import UsageError
from localllm.library.catalog import load_catalog
from localllm.library.describe import describe
from localllm.planner import cluster, joined_models
from localllm.planner.cluster import ClusterPlan, Link, SharedPlan
from localllm.planner.starting_settings import context_for
from localllm.planner.types import RunSettings, Workload

_COUNT_AND_NAME = re.compile(r"(\d+)\s*(?:x|×|\*)\s*(.+)", re.IGNORECASE)
_MAX_MACHINES = 32
_PART_NAMES = {2: "half", 3: "third", 4: "quarter"}


def machines(text: str) -> list[Device]:
    """Parse machines joined by "+", each with an optional count ("2x dgx spark").

    Raises UsageError and DeviceNotFoundError.
    """
    devices: list[Device] = []
    for part in text.split("+"):
        match = _COUNT_AND_NAME.fullmatch(part.strip())
        count = 1
        name = part.strip()
        if match is not None:
            count = int(match[1])
            name = match[2]
        if not 1 <= count <= _MAX_MACHINES:
            raise UsageError(
                f"{part.strip()!r}: the number of machines must be from 1 to {_MAX_MACHINES}"
            )
        devices += [resolve(name)] * count
    return devices


# The fastest port of machines that are connected to each other, by a pattern of the name.
_PORTS = (
    (re.compile(r"gb10|dgx spark", re.IGNORECASE), "connectx7"),
    (re.compile(r"\bm\d+ (pro|max|ultra)\b", re.IGNORECASE), "thunderbolt5"),
)
_DEFAULT_PORT = "10gbe"


def usual_link(device: str) -> str | None:
    """Return the link that connected machines such as "2x dgx spark" are usually joined by.

    Returns None if `device` names a single computer, with any number of cards.
    """
    if "+" not in device and _COUNT_AND_NAME.fullmatch(device.strip()) is None:
        return None
    try:
        devices = machines(device)
    except (DeviceNotFoundError, UsageError):
        return None
    if len(devices) < 2 or any(machine.kind == "discrete" for machine in devices):
        return None
    for pattern, link in _PORTS:
        if all(pattern.search(machine.name) for machine in devices):
            return link
    return _DEFAULT_PORT


def answer(
    device: str | None,
    link: str,
    reference: str | None,
    workload: Workload,
    *,
    everything: bool,
    as_json: bool,
) -> list[str]:
    """Return the lines of the answer: for one model, or for the models that only these machines
    together hold (the best, or `everything`).

    Raises UsageError if the question is incomplete.
    """
    link_speed = link_named(link)
    text, devices = _machines_of(device)
    if reference is None:
        models = load_catalog().models
        picks = joined_models.models_for(devices, models, workload, link_speed)
        best_single = joined_models.best_alone(devices, models, workload)
        joined_answer = JoinedAnswer(text, devices, link_speed, picks, best_single)
        if as_json:
            return joined_view.as_json(joined_answer)
        return joined_view.lines(joined_answer, everything=everything)
    model, quant = describe(reference, load_catalog())
    settings = RunSettings(n_ctx=context_for(model, workload), slots=workload.parallel)
    layers: list[tuple[str, ClusterPlan | None]] = []
    shared: list[tuple[str, SharedPlan | None]] = []
    for variant in model.variants:
        if quant and variant.quant.lower() != quant.lower():
            continue
        if not variant.is_folder:
            plan = cluster.plan(model, variant, settings, devices, link_speed)
            layers.append((variant.quant, plan))
        if not cluster.why_not(model, variant, devices):
            share_plan = cluster.tensor_parallel_plan(model, variant, settings, devices, link_speed)
            shared.append((variant.quant, share_plan))
    if as_json:
        plans = [_json(name, "layers", plan) for name, plan in layers]
        plans += [_json(name, "shared", share_plan) for name, share_plan in shared]
        return [json.dumps(plans, indent=2)]
    title = f"{model.id} over {' + '.join(box.name for box in devices)}, {link_speed.name}"
    lines = [title, *_layers_lines(layers), *_shares_lines(shared, len(devices))]
    return [*lines, *_basis(layers), *_basis(shared)]


def _layers_lines(plans: list[tuple[str, ClusterPlan | None]]) -> list[str]:
    """Format the plans that put full layers of each variant on each machine."""
    lines = []
    for quant, plan in plans:
        if plan is None:
            lines.append(f"{quant:8} does not fit on these machines together")
        else:
            lines += _plan_lines(quant, plan)
    return lines


def _shares_lines(plans: list[tuple[str, SharedPlan | None]], n_machines: int) -> list[str]:
    """Format the plans that put a share of every layer on each machine."""
    if not plans:
        return []
    part = _PART_NAMES.get(n_machines, f"{n_machines}th")
    lines = [f"tensor parallel: a {part} of every layer on each (MLX, `serve --with`):"]
    for quant, plan in plans:
        if plan is None:
            lines.append(f"{quant:8} does not fit with tensor parallelism")
        else:
            lines.append(_shared_line(quant, plan))
    return lines


def _basis(plans: Sequence[tuple[str, ClusterPlan | SharedPlan | None]]) -> list[str]:
    """Return the basis of the speeds, once."""
    basis = next((plan.decode_tok_s.basis for _, plan in plans if plan is not None), "")
    if basis:
        return [f"basis: {basis}"]
    return []


def link_named(name: str) -> Link:
    """Return the link of --link. Raises UsageError."""
    if name not in cluster.LINKS:
        raise UsageError(
            f"--link {name}: unknown link",
            hint=f"one of: {', '.join(cluster.LINKS)}",
            param="--link",
        )
    return cluster.LINKS[name]


def _machines_of(device: str | None) -> tuple[str, list[Device]]:
    """Return the text of --device, and the machines that it names. Raises UsageError."""
    if device is None:
        raise UsageError(
            "--link needs --device: it plans models on several machines",
            hint='--device "2x dgx spark" --link connectx7',
        )
    devices = machines(device)
    if len(devices) < 2:
        raise UsageError(
            "--link needs two machines or more",
            hint='for example --device "m3 ultra 512 + rtx 5090"',
        )
    return device, devices


def _plan_lines(quant: str, plan: ClusterPlan) -> list[str]:
    shares = [
        f"{share.n_layers} layers {share.needs_bytes / 1e9:.0f} of {share.limit_bytes / 1e9:.0f} GB"
        for share in plan.shares
    ]
    shortest_s, longest_s = plan.transfer_s
    transfer_text = f"{shortest_s * 1e3:.2f}-{longest_s * 1e3:.2f} ms"
    size_text = f"{plan.transfer_bytes / 1e3:.1f} kB"
    decode = plan.decode_tok_s
    speed = f"{decode.value:.1f} tok/s ({decode.low:.1f}-{decode.high:.1f})"
    return [
        f"{quant:8} decode {speed}, prompt {_prefill(plan)}; {', '.join(shares)}",
        f"{'':8} each token moves {size_text} between them, {transfer_text}, and RPC takes about "
        f"{plan.rpc_s * 1e3:.1f} ms",
        f"{'':8} {plan.advice}",
    ]


def _shared_line(quant: str, plan: SharedPlan) -> str:
    decode = plan.decode_tok_s
    range_text = f"{decode.low:.1f}-{decode.high:.1f}"
    speed = f"{decode.value:.1f} tok/s ({range_text}; one alone {plan.alone_tok_s:.1f})"
    memory = f"{plan.needs_bytes / 1e9:.0f} of {plan.limit_bytes / 1e9:.0f} GB on each"
    return f"{quant:8} decode {speed}, prompt {_prefill(plan)}; {memory}"


def _prefill(plan: ClusterPlan | SharedPlan) -> str:
    return f"{plan.prefill_tok_s.low:.0f}-{plan.prefill_tok_s.high:.0f} tok/s"


def _json(quant: str, split: str, plan: ClusterPlan | SharedPlan | None) -> dict[str, Any]:
    row = {"quant": quant, "split": split, "fits": plan is not None}
    if plan is None:
        return row
    if isinstance(plan, SharedPlan):
        details = _shared_json(plan)
    else:
        details = _layers_json(plan)
    return {
        **row,
        "n_ctx": plan.settings.n_ctx,
        "decode_tok_s": plan.decode_tok_s._asdict(),
        "prefill_tok_s": plan.prefill_tok_s._asdict(),
        **details,
    }


def _shared_json(plan: SharedPlan) -> dict[str, Any]:
    return {
        "shares": [
            {
                "device": device.name,
                "needs_bytes": plan.needs_bytes,
                "limit_bytes": device.memory.limit_bytes,
            }
            for device in plan.devices
        ],
        "alone_tok_s": plan.alone_tok_s,
    }


def _layers_json(plan: ClusterPlan) -> dict[str, Any]:
    shares = [
        {
            "device": share.device.name,
            "layers": share.n_layers,
            "needs_bytes": share.needs_bytes,
            "limit_bytes": share.limit_bytes,
        }
        for share in plan.shares
    ]
    return {
        "shares": shares,
        "link": asdict(plan.link),
        "transfer_bytes": plan.transfer_bytes,
        "transfer_s": plan.transfer_s,
        "rpc_s": plan.rpc_s,
        "alone": None if plan.alone is None else plan.alone.name,
        "advice": plan.advice,
    }
