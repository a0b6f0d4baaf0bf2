"""`localllm doctor MODEL`: check a model's file, and what its quant loses, in less than a minute."""

from __future__ import annotations

from localllm.cli import model_quality
from localllm.device.health import HealthCheck
from localllm.library.types import LocalModel
from localllm.quants.verdict import loss_ratio, more_exact_file

# Fewer and shorter blocks than `localllm quality`: the error is larger, but a fault is far above
# it.
_BLOCKS = 3
_BLOCK_TOKENS = 256


def model_checks(model: LocalModel) -> list[HealthCheck]:
    """Return the checks of a model, each with its fix.

    Raises the errors of loading it.
    """
    reference = more_exact_file(model)
    request = model_quality.QualityRequest(
        model, reference, blocks=_BLOCKS, block_tokens=_BLOCK_TOKENS
    )
    verdict = model_quality.measure_and_judge(request)
    checks = []
    for fault in verdict.faults:
        fix = f"download it again, or make it again: localllm quality {model.path} measures it"
        checks.append(HealthCheck(fault.kind, "error", f"{model.name}: {fault.text}", fix))
    if not checks:
        checks.append(HealthCheck("file", "ok", f"{model.name}: no fault was found"))
    if verdict.found.blocks:
        checks.append(_loss_check(verdict))
    return checks


def _loss_check(verdict: model_quality.QualityVerdict) -> HealthCheck:
    """Return the measured loss, or the reason why it was not measured."""
    comparison = verdict.found
    reference = verdict.request.reference
    if reference is None or not comparison.has_reference:
        perplexity = model_quality.estimate_text(comparison.perplexity, 2)
        text = (
            "no more exact file of this model is on this disk to compare it with; its perplexity "
            f"on the shipped text is {perplexity}"
        )
        fix = "localllm quality MODEL --against OTHER"
        return HealthCheck("loss", "not checked", text, fix)
    text = (
        f"KL divergence {model_quality.estimate_text(comparison.kl, 4)} nats from "
        f"{reference.path.name}"
    )
    ratio = loss_ratio(comparison, verdict.request.model, reference)
    if ratio is not None:
        text += f", {ratio:.1f} times what {verdict.request.model.quant} loses elsewhere"
    return HealthCheck("loss", "ok", text, "")
