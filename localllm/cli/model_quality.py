"""Measure a model for `localllm quality` and `localllm doctor MODEL`: loads, progress and output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from localllm.engine.worker import backends
from localllm.errors import BackendError, UsageError
from localllm.library.catalog import load_catalog, open_model
from localllm.library.types import LocalModel
from localllm.load.load_plan import LoadPlan, make_load_plan
from localllm.load.measured_losses import MeasuredLoss, keep_loss
from localllm.memory.system import free_for_models
from localllm.plain_output import TerminalLine
from localllm.quants.file_faults import Fault
from localllm.quants.quality import (
    BLOCK_TOKENS,
    EngineModel,
    Estimate,
    QualityFigures,
    QualityOrder,
    measure,
    sample_text,
)
from localllm.quants.source import target_bits
from localllm.quants.verdict import file_faults, measured_faults
from localllm.settings import Settings
from localllm_backends.contract import KvType

_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


# A reference with fewer bits a weight loses too much itself.
_MIN_REFERENCE_BITS = 8
# The beginning of a line that names a fault.
FAULT = "fault: "


@dataclass(frozen=True, slots=True)
class QualityRequest:
    """What a user wants to measure.

    `kv_type`: KV type of the model; the reference is then the same model with f16 ("": f16).
    `blocks`: 0 = until the error is small.
    """

    model: LocalModel
    reference: LocalModel | None = None
    kv_type: str = ""
    text: str = ""
    blocks: int = 0
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Judged:
    """A measurement and the faults that were found."""

    request: QualityRequest
    found: QualityFigures
    faults: Sequence[Fault]


def judged(request: QualityRequest, *, quiet: bool = False) -> Judged:
    """Measure and judge a model. A terminal shows the figures so far, unless `quiet` is set.

    Raises DoesNotFitError, BackendError and the errors of planning.
    """
    if request.kv_type and request.kv_type not in _KV_TYPES:
        raise UsageError(
            f"there is no KV type {request.kv_type[:20]!r}", hint=f"known: {', '.join(_KV_TYPES)}"
        )
    faults = file_faults(request.model, request.reference)
    line = TerminalLine(sys.stderr)

    def show(text: str) -> None:
        if not quiet:
            line.show(text)

    def on_block(found: QualityFigures, n_blocks: int) -> None:
        show(f"block {len(found.blocks)} of at most {n_blocks}: {_running(found)}")

    def on_stored(n_stored: int, of: int) -> None:
        show(f"reading the text with the reference: block {n_stored} of {of}")

    show(f"loading {request.model.name} …")
    try:
        found = measure(_order(request), on_block, on_stored)
    except BackendError as e:
        # The engine may be unable to run a file whose header shows why.
        if not faults:
            raise
        faults.append(Fault("engine", f"the engine can't run it: {e.message}"))
        return Judged(request, QualityFigures(), faults)
    finally:
        show("")
    faults += measured_faults(found, request.model, request.reference)
    if not faults:
        _keep(request, found)
    return Judged(request, found, faults)


def _keep(request: QualityRequest, found: QualityFigures) -> None:
    """Store the loss of a quant for the planner, if its reference is nearly exact."""
    reference = request.reference
    if reference is None or request.kv_type or not found.has_reference or not found.blocks:
        return
    model = open_model(request.model, load_catalog()).model
    ratio = found.ln_ratio
    if model is None or ratio.error is None or target_bits(reference.quant) < _MIN_REFERENCE_BITS:
        return
    today = datetime.now(UTC).date().isoformat()
    loss = MeasuredLoss(
        model.id, request.model.quant, ratio.value, ratio.error, reference.quant, today
    )
    keep_loss(loss)


def _order(request: QualityRequest) -> QualityOrder:
    load = _load_plan(request.model, request.block_tokens)
    subject = _engine_model(load, request.kv_type or "f16")
    needs_bytes = load.needs_bytes
    reference = None
    if request.kv_type:
        reference = _engine_model(load, "f16")
    elif request.reference is not None:
        other = _load_plan(request.reference, request.block_tokens)
        reference = _engine_model(other, "f16")
        needs_bytes += other.needs_bytes
    free_bytes = free_for_models()
    return QualityOrder(
        subject,
        reference,
        request.text or sample_text(),
        request.blocks,
        request.block_tokens,
        at_once=free_bytes is None or needs_bytes <= free_bytes,
    )


def _load_plan(local: LocalModel, n_ctx: int) -> LoadPlan:
    # A plan needs a context of usual size, whatever the size of a block.
    context = max(n_ctx, BLOCK_TOKENS)
    settings = Settings({"context": context, "parallel": 1, "draft": "off", "kv_type": "f16"})
    load = make_load_plan(local, settings)
    if load.embedding is not None:
        raise UsageError(
            f"{local.name} is an embedding model or a reranker: it predicts no text",
            hint="give a model that generates text",
        )
    load.options.check_memory()
    return load


def _engine_model(load: LoadPlan, kv_type: str) -> EngineModel:
    kind = cast("KvType", kv_type)
    spec = replace(
        load.options.spec,
        kv_type_k=kind,
        kv_type_v=kind,
        n_rewind=0,
        mtp=False,
        drafter="",
        projector="",
        adapters=(),
    )
    return EngineModel(backends.for_path(spec.path).declaration.name, spec)


# --- output ---------------------------------------------------------------------------------------


def _running(found: QualityFigures) -> str:
    text = f"perplexity {shown(found.perplexity, 2)}"
    if found.has_reference:
        text += f", KL divergence {shown(found.kl, 4)}"
    return text


def shown(estimate: Estimate, digits: int) -> str:
    """Format an estimate and its error: "0.0536 ± 0.0012"."""
    text = f"{estimate.value:.{digits}f}"
    if estimate.error is not None:
        text += f" ± {estimate.error:.{digits}f}"
    return text


def _share(estimate: Estimate) -> str:
    return shown(Estimate(100 * estimate.value, _percent(estimate.error)), 1) + " %"


def _percent(share: float | None) -> float | None:
    if share is None:
        return None
    return 100 * share


def lines(judged: Judged) -> list[str]:
    """Format the figures and the faults."""
    request = judged.request
    found = judged.found
    out = [f"{_named(request.model)}: {found.n_tokens:,} tokens in {len(found.blocks)} blocks"]
    if found.blocks:
        out.append(f"perplexity      {shown(found.perplexity, 2)}")
    if found.blocks and found.has_reference:
        against = f"{_named(request.reference or request.model)}"
        if request.kv_type:
            against += ", KV in f16"
        out += [
            f"against         {against}: perplexity {shown(found.reference_perplexity, 2)}",
            f"ln of ratio     {shown(found.ln_ratio, 4)}",
            f"KL divergence   {shown(found.kl, 4)} nats a token",
            f"same top token  {_share(found.same_top)}",
        ]
    out += [f"{FAULT}{fault.text}" for fault in judged.faults]
    return out


def _named(model: LocalModel) -> str:
    if model.quant and not model.name.endswith(model.quant):
        return f"{model.name} {model.quant}"
    return model.name


def as_json(judged: Judged) -> dict[str, Any]:
    """Return the figures and the faults for --json."""
    request = judged.request
    found = judged.found
    body: dict[str, Any] = {
        "model": str(request.model.path),
        "reference": None if request.reference is None else str(request.reference.path),
        "kv_type": request.kv_type or "f16",
        "block_tokens": request.block_tokens,
        "blocks": len(found.blocks),
        "tokens": found.n_tokens,
    }
    if found.blocks:
        body["perplexity"] = _figures(found.perplexity)
    if found.blocks and found.has_reference:
        body |= {
            "reference_perplexity": _figures(found.reference_perplexity),
            "ln_perplexity_ratio": _figures(found.ln_ratio),
            "kl_divergence_nats": _figures(found.kl),
            "same_top_token": _figures(found.same_top),
        }
    faults = [{"kind": fault.kind, "text": fault.text} for fault in judged.faults]
    return {**body, "faults": faults}


def _figures(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "error": estimate.error}
