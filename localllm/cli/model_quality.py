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
class QualityVerdict:
    """A measurement and the faults that were found."""

    request: QualityRequest
    found: QualityFigures
    faults: Sequence[Fault]


def measure_and_judge(request: QualityRequest, *, quiet: bool = False) -> QualityVerdict:
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

    def on_block(figures: QualityFigures, n_blocks: int) -> None:
        show(f"block {len(figures.blocks)} of at most {n_blocks}: {_progress_text(figures)}")

    def on_stored(n_stored: int, n_blocks: int) -> None:
        show(f"reading the text with the reference: block {n_stored} of {n_blocks}")

    show(f"loading {request.model.name} …")
    try:
        figures = measure(_measuring_order(request), on_block, on_stored)
    except BackendError as e:
        # The engine may be unable to run a file whose header shows why.
        if not faults:
            raise
        faults.append(Fault("engine", f"the engine can't run it: {e.message}"))
        return QualityVerdict(request, QualityFigures(), faults)
    finally:
        show("")
    faults += measured_faults(figures, request.model, request.reference)
    if not faults:
        _store_loss(request, figures)
    return QualityVerdict(request, figures, faults)


def _store_loss(request: QualityRequest, figures: QualityFigures) -> None:
    """Store the loss of a quant for the planner, if its reference is nearly exact."""
    reference = request.reference
    if reference is None or request.kv_type or not figures.has_reference or not figures.blocks:
        return
    model = open_model(request.model, load_catalog()).model
    ratio = figures.ln_ratio
    if model is None or ratio.error is None or target_bits(reference.quant) < _MIN_REFERENCE_BITS:
        return
    today = datetime.now(UTC).date().isoformat()
    loss = MeasuredLoss(
        model.id, request.model.quant, ratio.value, ratio.error, reference.quant, today
    )
    keep_loss(loss)


def _measuring_order(request: QualityRequest) -> QualityOrder:
    load = _load_plan(request.model, request.block_tokens)
    subject = _engine_model(load, request.kv_type or "f16")
    needs_bytes = load.needs_bytes
    reference = None
    if request.kv_type:
        reference = _engine_model(load, "f16")
    elif request.reference is not None:
        reference_load = _load_plan(request.reference, request.block_tokens)
        reference = _engine_model(reference_load, "f16")
        needs_bytes += reference_load.needs_bytes
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


def _progress_text(figures: QualityFigures) -> str:
    text = f"perplexity {estimate_text(figures.perplexity, 2)}"
    if figures.has_reference:
        text += f", KL divergence {estimate_text(figures.kl, 4)}"
    return text


def estimate_text(estimate: Estimate, digits: int) -> str:
    """Format an estimate and its error: "0.0536 ± 0.0012"."""
    text = f"{estimate.value:.{digits}f}"
    if estimate.error is not None:
        text += f" ± {estimate.error:.{digits}f}"
    return text


def _percent_text(estimate: Estimate) -> str:
    return estimate_text(Estimate(100 * estimate.value, _percent(estimate.error)), 1) + " %"


def _percent(share: float | None) -> float | None:
    if share is None:
        return None
    return 100 * share


def lines(measure_and_judge: QualityVerdict) -> list[str]:
    """Format the figures and the faults."""
    request = measure_and_judge.request
    figures = measure_and_judge.found
    text_lines = [
        f"{_name_and_quant(request.model)}: {figures.n_tokens:,} tokens in "
        f"{len(figures.blocks)} blocks"
    ]
    if figures.blocks:
        text_lines.append(f"perplexity      {estimate_text(figures.perplexity, 2)}")
    if figures.blocks and figures.has_reference:
        against = f"{_name_and_quant(request.reference or request.model)}"
        if request.kv_type:
            against += ", KV in f16"
        text_lines += [
            f"against         {against}: perplexity "
            f"{estimate_text(figures.reference_perplexity, 2)}",
            f"ln of ratio     {estimate_text(figures.ln_ratio, 4)}",
            f"KL divergence   {estimate_text(figures.kl, 4)} nats a token",
            f"same top token  {_percent_text(figures.same_top)}",
        ]
    text_lines += [f"{FAULT}{fault.text}" for fault in measure_and_judge.faults]
    return text_lines


def _name_and_quant(model: LocalModel) -> str:
    if model.quant and not model.name.endswith(model.quant):
        return f"{model.name} {model.quant}"
    return model.name


def as_json(measure_and_judge: QualityVerdict) -> dict[str, Any]:
    """Return the figures and the faults for --json."""
    request = measure_and_judge.request
    figures = measure_and_judge.found
    body: dict[str, Any] = {
        "model": str(request.model.path),
        "reference": None if request.reference is None else str(request.reference.path),
        "kv_type": request.kv_type or "f16",
        "block_tokens": request.block_tokens,
        "blocks": len(figures.blocks),
        "tokens": figures.n_tokens,
    }
    if figures.blocks:
        body["perplexity"] = _figures(figures.perplexity)
    if figures.blocks and figures.has_reference:
        body |= {
            "reference_perplexity": _figures(figures.reference_perplexity),
            "ln_perplexity_ratio": _figures(figures.ln_ratio),
            "kl_divergence_nats": _figures(figures.kl),
            "same_top_token": _figures(figures.same_top),
        }
    faults = [{"kind": fault.kind, "text": fault.text} for fault in measure_and_judge.faults]
    return {**body, "faults": faults}


def _figures(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "error": estimate.error}
