"""Measure a model on a text: perplexity, and its distance from a reference, with error bars."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from localllm.quants.process import BackendProgram
from localllm_backends.contract import LoadSpec

BLOCK_TOKENS = 512
# Without a number of blocks, measuring ends when the error of the KL divergence (or of the
# perplexity, without a reference) is below this share of it, or after the most blocks.
_TARGET_ERROR_SHARE = 0.05
_MIN_BLOCKS = 4
_MAX_BLOCKS = 32
_POLL_S = 0.5


@cache
def sample_text() -> str:
    """The shipped text: technical English, with tables and Python code."""
    return Path(__file__).with_name("sample_text.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model as an engine loads it."""

    engine: str
    spec: LoadSpec


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over blocks and its standard error (None with only one block)."""

    value: float
    error: float | None


@dataclass(slots=True)
class QualityFigures:
    """Sums over each measured block, as localllm_backends/quality_process.py sends them.

    `differs`: how the two models read the text differently; then there is no comparison.
    `bos_differs`: whether they begin a text with different BOS tokens.
    """

    blocks: list[dict[str, float]] = field(default_factory=list)
    has_reference: bool = False
    differs: str = ""
    bos_differs: bool = False

    @property
    def n_tokens(self) -> int:
        """Evaluated tokens."""
        return int(sum(block["tokens"] for block in self.blocks))

    def _mean(self, name: str) -> Estimate:
        values = [block[name] / block["tokens"] for block in self.blocks]
        error = None
        if len(values) > 1:
            error = stdev(values) / math.sqrt(len(values))
        return Estimate(fmean(values), error)

    def _perplexity(self, name: str) -> Estimate:
        nll = self._mean(name)
        value = math.exp(nll.value)
        if nll.error is None:
            return Estimate(value, None)
        return Estimate(value, value * nll.error)

    @property
    def perplexity(self) -> Estimate:
        return self._perplexity("nll")

    @property
    def reference_perplexity(self) -> Estimate:
        return self._perplexity("reference_nll")

    @property
    def ln_ratio(self) -> Estimate:
        """ln(perplexity / the reference's perplexity). The error is that of the difference in each
        block, which is far smaller than that of each perplexity."""
        values = [(b["nll"] - b["reference_nll"]) / b["tokens"] for b in self.blocks]
        error = None
        if len(values) > 1:
            error = stdev(values) / math.sqrt(len(values))
        return Estimate(fmean(values), error)

    @property
    def kl(self) -> Estimate:
        """Mean KL(reference || model) in nats a token."""
        return self._mean("kl")

    @property
    def same_top(self) -> Estimate:
        """Share of tokens after which both models find the same token most likely."""
        return self._mean("same_top")

    @property
    def is_enough(self) -> bool:
        """True if the error is small enough to stop."""
        if len(self.blocks) < _MIN_BLOCKS:
            return False
        judged = self.kl if self.has_reference else self._mean("nll")
        return judged.error is not None and judged.error <= _TARGET_ERROR_SHARE * judged.value


@dataclass(frozen=True, slots=True)
class QualityOrder:
    """A model to measure on `text`, against `reference` if there is one.

    `blocks`: their number (0: until the error is small). `at_once`: both models fit in memory
    together.
    """

    subject: EngineModel
    reference: EngineModel | None
    text: str
    blocks: int = 0
    block_tokens: int = BLOCK_TOKENS
    at_once: bool = True


def measure(
    order: QualityOrder,
    on_block: Callable[[QualityFigures, int], None],
    on_stored: Callable[[int, int], None],
) -> QualityFigures:
    """Measure in a process of its own.

    `on_block` gets the measurement so far and the number of blocks to measure, after each block.
    `on_stored` gets the stored blocks of the reference and their number. Ctrl-C ends measuring: the
    blocks that were measured by then are the result.

    Raises BackendError with the engine's reason.
    """
    figures = QualityFigures(has_reference=order.reference is not None)
    with ExitStack() as stack:
        store_folder = ""
        if order.reference is not None and not order.at_once:
            store_folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="localllm-quality-")
            )
        program = BackendProgram("quality_process", _as_json(order, store_folder))
        stack.enter_context(closing(program))
        try:
            _follow(program, figures, order, on_block, on_stored)
        except KeyboardInterrupt:
            # The blocks that were measured are an answer.
            if not figures.blocks:
                raise
    return figures


def _follow(
    program: BackendProgram,
    figures: QualityFigures,
    order: QualityOrder,
    on_block: Callable[[QualityFigures, int], None],
    on_stored: Callable[[int, int], None],
) -> None:
    """Add the program's messages to `figures` until its end, or until the error is small enough."""
    n_blocks = 0
    for message in program.messages(_POLL_S):
        if "differs" in message:
            figures.differs = message["differs"]
            figures.has_reference = False
        elif "bos" in message:
            figures.bos_differs = True
        elif "stored" in message:
            on_stored(message["stored"], message["of"])
        elif "blocks" in message:
            n_blocks = message["blocks"]
        elif "tokens" in message:
            figures.blocks.append(message)
            on_block(figures, n_blocks)
            if not order.blocks and figures.is_enough:
                return


def _as_json(order: QualityOrder, store_folder: str) -> dict[str, Any]:
    reference = None
    if order.reference is not None:
        reference = asdict(order.reference)
    return {
        "subject": asdict(order.subject),
        "reference": reference,
        "text": order.text,
        "block_tokens": order.block_tokens,
        "most_blocks": order.blocks or _MAX_BLOCKS,
        "store": store_folder,
    }
