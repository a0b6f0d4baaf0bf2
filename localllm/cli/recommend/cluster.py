"""`localllm recommend --link …`: one model over several machines, in a few lines or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from localllm.device.named import resolve
from localllm.device.types import Device
from localllm.errors import UsageError
from localllm.library.catalog import load_catalog
from localllm.library.describe import describe
from localllm.planner import cluster
from localllm.planner.cluster import ClusterPlan, SharedPlan
from localllm.planner.starting_settings import context_for
from localllm.planner.types import RunSettings, Workload

_COUNTED = re.compile(r"(\d+)\s*(?:x|×|\*)\s*(.+)", re.IGNORECASE)
_MOST_MACHINES = 32
_PARTS = {2: "half", 3: "third", 4: "quarter"}


def machines(text: str) -> list[Device]:
    """The machines that `text` joins by plus, each counted ("2x dgx spark"). Raises UsageError and
    DeviceNotFoundError."""
    found: list[Device] = []
    for part in text.split("+"):
        match = _COUNTED.fullmatch(part.strip())
        count = 1
        name = part.strip()
        if match is not None:
            count = int(match[1])
            name = match[2]
        if not 1 <= count <= _MOST_MACHINES:
            raise UsageError(
                f"{part.strip()!r}: from 1 to {_MOST_MACHINES} machines are planned for"
            )
        found += [resolve(name)] * count
    return found


def answer(
    device: str | None, link: str, reference: str | None, workload: Workload, *, as_json: bool
) -> list[str]:
    """The answer, line by line. Raises UsageError where the question lacks something."""
    boxes, reference = _joined(device, link, reference)
    model, quant = describe(reference, load_catalog())
    settings = RunSettings(n_ctx=context_for(model, workload), slots=workload.parallel)
    way = cluster.LINKS[link]
    variants = [v for v in model.variants if not quant or v.quant.lower() == quant.lower()]
    plans = [
        (v.quant, cluster.plan(model, v, settings, boxes, way)) for v in variants if not v.is_folder
    ]
    shareable = [v for v in variants if not cluster.why_not(model, v, boxes)]
    shared = [
        (v.quant, cluster.tensor_parallel_plan(model, v, settings, boxes, way)) for v in shareable
    ]
    if as_json:
        both = [_json(quant, "layers", p) for quant, p in plans]
        return [json.dumps([*both, *(_json(q, "shared", p) for q, p in shared)], indent=2)]
    lines = [f"{model.id} over {' + '.join(b.name for b in boxes)}, {way.name}"]
    for name, found in plans:
        none = [f"{name:8} does not fit on all of them together"]
        lines += none if found is None else _lines(name, found)
    if shared:
        lines.append(
            f"a {_PARTS.get(len(boxes), f'{len(boxes)}th')} of every layer on each (MLX, "
            "`serve "
            "--with`):"
        )
    for name, part in shared:
        lines += _shared_lines(name, part) if part is not None else [f"{name:8} does not fit so"]
    return [*lines, *_basis(plans), *_basis(shared)]


def _basis(plans: Sequence[tuple[str, ClusterPlan | SharedPlan | None]]) -> list[str]:
    """What the speeds rest on, said once."""
    basis = next((plan.decode_tok_s.basis for _, plan in plans if plan is not None), "")
    if basis:
        return [f"basis: {basis}"]
    return []


def _joined(device: str | None, link: str, reference: str | None) -> tuple[list[Device], str]:
    """The machines that are joined, and the model."""
    if link not in cluster.LINKS:
        raise UsageError(
            f"--link {link}: not a link", hint=f"one of: {', '.join(cluster.LINKS)}", param="--link"
        )
    if device is None or reference is None:
        raise UsageError(
            "--link joins machines for one model",
            hint='--device "2x dgx spark" -m MODEL --link connectx7',
        )
    boxes = machines(device)
    if len(boxes) < 2:
        raise UsageError(
            "--link joins two machines or more", hint='such as --device "m3 ultra 512 + rtx 5090"'
        )
    return boxes, reference


def _lines(quant: str, plan: ClusterPlan) -> list[str]:
    parts = ", ".join(
        f"{s.n_layers} layers {s.needs_bytes / 1e9:.0f} of {s.limit_bytes / 1e9:.0f} GB"
        for s in plan.shares
    )
    decode = plan.decode_tok_s
    prefill = plan.prefill_tok_s
    wait = plan.transfer_s
    return [
        f"{quant:8} decode {decode.value:.1f} tok/s ({decode.low:.1f}-{decode.high:.1f}), prompt "
        f"{prefill.low:.0f}-"
        f"{prefill.high:.0f} tok/s; {parts}",
        f"{'':8} a token carries {plan.transfer_bytes / 1e3:.1f} kB between them, "
        f"{wait[0] * 1e3:.2f}-{wait[1] * 1e3:.2f} ms, "
        f"and RPC takes about {plan.rpc_s * 1e3:.1f} ms",
        f"{'':8} {plan.advice}",
    ]


def _shared_lines(quant: str, plan: SharedPlan) -> list[str]:
    decode = plan.decode_tok_s
    prefill = plan.prefill_tok_s
    return [
        f"{quant:8} decode {decode.value:.1f} tok/s ({decode.low:.1f}-{decode.high:.1f}; one "
        f"alone {plan.alone_tok_s:.1f}), prompt "
        f"{prefill.low:.0f}-{prefill.high:.0f} tok/s; {plan.needs_bytes / 1e9:.0f} of "
        f"{plan.limit_bytes / 1e9:.0f} GB on each"
    ]


def _json(quant: str, split: str, plan: ClusterPlan | SharedPlan | None) -> dict[str, Any]:
    which = {"quant": quant, "split": split, "fits": plan is not None}
    if plan is None:
        return which
    if isinstance(plan, SharedPlan):
        own = _shared_json(plan)
    else:
        own = _layers_json(plan)
    return {
        **which,
        "n_ctx": plan.settings.n_ctx,
        "decode_tok_s": asdict(plan.decode_tok_s),
        "prefill_tok_s": asdict(plan.prefill_tok_s),
        **own,
    }


def _shared_json(plan: SharedPlan) -> dict[str, Any]:
    return {
        "shares": [
            {"device": d.name, "needs_bytes": plan.needs_bytes, "limit_bytes": d.memory.limit_bytes}
            for d in plan.devices
        ],
        "alone_tok_s": plan.alone_tok_s,
    }


def _layers_json(plan: ClusterPlan) -> dict[str, Any]:
    return {
        "shares": [
            {
                "device": s.device.name,
                "layers": s.n_layers,
                "needs_bytes": s.needs_bytes,
                "limit_bytes": s.limit_bytes,
            }
            for s in plan.shares
        ],
        "link": asdict(plan.link),
        "transfer_bytes": plan.transfer_bytes,
        "transfer_s": plan.transfer_s,
        "rpc_s": plan.rpc_s,
        "alone": plan.alone.name if plan.alone is not None else None,
        "advice": plan.advice,
    }
