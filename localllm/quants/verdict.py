"""Judge a measurement: the faults of a model's files, and its loss compared with published ones."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import ModelFileError
from localllm.library import names, store
from localllm.library.catalog import read_header
from localllm.library.types import LocalModel
from localllm.quants.file_faults import Fault, compared_faults, own_faults
from localllm.quants.quality import QualityFigures
from localllm.quants.source import read_source, target_bits
from localllm_catalog import quants
from localllm_catalog.gguf import GgufHeader
from localllm_catalog.names import without_quant

# A file that loses more than this many times the loss of its quant elsewhere has a fault. Twelve
# healthy quants of SmolLM2-135M lose 0.2 to 2.3 times as much (tests/quants/test_quality.py).
_FAULTY_RATIO = 3.0
# A loss below this is rounding, which differs between kernels: nats a token.
_NOISE_NATS = 0.004
_EXACT_BITS = 16


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """The loss of a quant elsewhere, scaled to this model's size: nats a token."""

    quant: str
    nats: float

    def ratio(self, measured_nats: float) -> float:
        """Return how many times the expected loss was found. Rounding counts as expected."""
        return measured_nats / (self.nats + _NOISE_NATS)


def expected_loss(quant: str, n_params: float) -> ExpectedLoss | None:
    """Return the loss of a quant elsewhere; None for an unknown quant, or 16 bits and more.

    It is the published one, or that of other quants with as many bits if that is higher: formats
    of 5 bits lose more on small models than their published figures say.
    """
    bits = target_bits(quant)
    if not bits or bits >= _EXACT_BITS:
        return None
    mixture = quants.MIXTURES.get(quant.upper())
    published = 0.0
    if mixture is not None:
        bits = mixture.file_bits
        published = quants.published_loss(mixture, n_params) or 0.0
    return ExpectedLoss(quant, max(published, quants.loss_by_bits(bits, n_params)))


def file_faults(model: LocalModel, reference: LocalModel | None) -> list[Fault]:
    """Return the faults that the headers of GGUF files show; [] for other formats."""
    header = _gguf_header(model)
    if header is None:
        return []
    faults = own_faults(header, model.quant)
    if reference is not None and reference.path != model.path:
        exact = _gguf_header(reference)
        if exact is not None:
            faults += compared_faults(header, exact, reference.path.name)
    return faults


def measured_faults(
    figures: QualityFigures, model: LocalModel, reference: LocalModel | None
) -> list[Fault]:
    """Return the faults that only the measurement shows."""
    faults: list[Fault] = []
    if reference is None:
        return faults
    name = reference.path.name
    if figures.differs:
        text = f"it reads the text as other tokens than {name}: {figures.differs}"
        faults.append(Fault("vocabulary", text))
    if figures.bos_differs:
        text = f"it begins a text with another BOS token than {name}, or with none of them"
        faults.append(Fault("bos", text))
    ratio = loss_ratio(figures, model, reference)
    if ratio is not None and ratio > _FAULTY_RATIO:
        text = (
            f"it loses {ratio:.0f} times what {model.quant} loses elsewhere: the file, its "
            "template or this engine is wrong"
        )
        faults.append(Fault("loss", text))
    return faults


def loss_ratio(
    figures: QualityFigures, model: LocalModel, reference: LocalModel | None
) -> float | None:
    """Return the measured loss as a multiple of the loss of the quant elsewhere; None if one of
    them is unknown."""
    header = _gguf_header(model)
    if not figures.has_reference or header is None or reference is None:
        return None
    n_params = sum(tensor.n_elements for tensor in header.tensors)
    expected = expected_loss(model.quant, n_params)
    if expected is None:
        return None
    return expected.ratio(figures.kl.value)


def _gguf_header(model: LocalModel) -> GgufHeader | None:
    if model.is_folder:
        return None
    return read_header(model.path)


def more_exact_file(model: LocalModel) -> LocalModel | None:
    """Return the most exact other file of the same model on this disk, or None.

    It has the same name without the quant, and more bits a weight.
    """
    own_name = names.bare(without_quant(model.name))
    candidates = []
    for other in [*store.scan(), *_models_beside(model)]:
        if other.path != model.path and names.bare(without_quant(other.name)) == own_name:
            bits = _lowest_bits(other)
            if bits > _lowest_bits(model):
                candidates.append((bits, -other.size_bytes, str(other.path), other))
    if candidates:
        return max(candidates)[-1]
    return None


def _models_beside(model: LocalModel) -> list[LocalModel]:
    """Return the models in the same folder as a file that was given by its path."""
    from localllm.library import folders

    if model.is_folder or model.origin != "path":
        return []
    files = [file for file in model.path.parent.iterdir() if file.is_file()]
    return folders.ggufs(files, "path")


def _lowest_bits(model: LocalModel) -> float:
    try:
        return read_source(model).lowest_bits
    except ModelFileError:
        return 0.0
