"""The type of a backend: the entry that recognises and loads a Variant, before any engine is loaded.

Every command reads the declarations of all types, so this module does not import the values of a loaded
backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localllm_backends.declaration import Declaration
from localllm_backends.failures import LoadError

if TYPE_CHECKING:
    from localllm_backends.contract import Backend
    from localllm_backends.values import LoadSpec, QuantizeOrder


class BackendType(ABC):
    """An entry of the entry-point group `localllm.backends`: recognises and loads a Variant.

    Its import must not import the engine.
    """

    declaration: Declaration

    @abstractmethod
    def available(self) -> str | None:
        """Return None if the backend can run here, else one sentence: the missing part and how to
        install it."""

    def read_code(self) -> None:  # noqa: B027 - optional
        """Import the modules that every load needs, before the model is known."""

    def prepare(self) -> None:  # noqa: B027 - optional
        """Initialise the libraries that a load needs, before its settings are known. Raises
        BackendFailure."""

    @abstractmethod
    def accepts(self, path: str) -> bool:
        """Return True if `path` is a Variant in this backend's format."""

    @abstractmethod
    def vocabulary(self, path: str) -> list[bytes]:
        """Return the bytes of every token, without loading the weights.

        Control tokens are given as they are written. Raises LoadError.
        """

    @abstractmethod
    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        """Load a Variant. Raises LoadError or OutOfMemoryError.

        `on_progress` is called with 0.0 … 1.0 while the weights are read.
        """

    def reads_images(self) -> str | None:
        """Return None if an image projector could be loaded, else the reason."""
        return "this backend does not support images"

    def image_bytes(self, path: str) -> int:
        """Return the bytes that image input needs in addition to the weights.

        This is for models whose own files include a vision encoder; `LoadSpec.projector` is then
        the model's own path. Returns 0 if they don't include one. Raises BackendFailure if this
        backend can't use the encoder.
        """
        return 0

    def load_embedder(
        self,
        path: str,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_gpu_layers: int = -1,
        on_progress: Callable[[float], None] | None = None,
    ) -> Any:
        """Load the embedding model or reranker at `path`, for use by one thread.

        The result has the interface of LlamaCppEmbedder (llamacpp/embed.py). Raises LoadError, also
        if the model computes neither embeddings nor scores.
        """
        raise LoadError(f"the {self.declaration.name} backend does not support embedding models")

    def quantize(self, order: QuantizeOrder, on_planned: Callable[[int], None]) -> None:
        """Write a quant of a model in this backend's format.

        `on_planned` is called once before writing, with the bytes of the result (0: unknown).
        Raises LoadError.
        """
        raise LoadError(f"the {self.declaration.name} backend can't make quants")
