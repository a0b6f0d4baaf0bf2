"""The llama.cpp backend: GGUF files through llama.cpp's libraries.

Importing this module loads no native code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm_backends.backend_type import BackendType
from localllm_backends.declaration import Declaration
from localllm_backends.failures import UnusableEngineError

if TYPE_CHECKING:
    from localllm_backends.contract import Backend, LoadSpec, QuantizeOrder


class LlamaCppType(BackendType):
    declaration = Declaration(
        name="llamacpp",
        label="llama.cpp",
        formats=("gguf",),
        files="GGUF files",
        packages=("llama-cpp-python",),
        library_variable="LLAMA_CPP_LIB_PATH",
        splits=True,
        mixed_kv=True,
        host_embedding=True,
        disk_tables=True,
        repacks_weights=True,
        spare_sequence=True,
        draft_heads=True,
        trained_drafters=True,
        adapters="file",
        projectors=True,
        snapshots=True,
    )

    def available(self) -> str | None:
        from localllm_backends.llamacpp.binding.engine_files import library_folder

        if library_folder() is None:
            return (
                "llama-cpp-python is not installed: run `pip install llama-cpp-python` "
                "(needs a C++ compiler)"
            )
        return None

    def read_code(self) -> None:
        import localllm_backends.llamacpp.load  # noqa: F401
        from localllm_backends.llamacpp.weights import native_libraries

        # If the library can't be used, loading a model raises this error again.
        with suppress(UnusableEngineError):
            native_libraries()

    def prepare(self) -> None:
        from localllm_backends.llamacpp.native import start_native

        start_native()

    def accepts(self, path: str) -> bool:
        """Return True for a file with GGUF's magic, or with the suffix .gguf.

        A truncated .gguf file is accepted here, so that loading can report the error.
        """
        file = Path(path)
        if not file.is_file():
            return False
        if file.suffix.lower() == ".gguf":
            return True
        with file.open("rb") as f:
            return f.read(4) == b"GGUF"

    def vocabulary(self, path: str) -> list[bytes]:
        from localllm_backends.llamacpp.model_info import vocabulary

        return vocabulary(path)

    def reads_images(self) -> str | None:
        """Return None if a projector could be loaded, else the missing part. Imports no native
        code."""
        from localllm_backends.llamacpp.binding.engine_files import library_path
        from localllm_backends.llamacpp.media import WITHOUT

        if library_path("mtmd"):
            return None
        return WITHOUT

    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        from localllm_backends.llamacpp.load import load

        return load(spec, on_progress)

    def load_embedder(
        self,
        path: str,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_gpu_layers: int = -1,
        on_progress: Callable[[float], None] | None = None,
    ) -> Any:
        from localllm_backends.llamacpp.embed import load_embedder

        return load_embedder(
            path,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_gpu_layers=n_gpu_layers,
            on_progress=on_progress,
        )

    def quantize(self, order: QuantizeOrder, on_planned: Callable[[int], None]) -> None:
        from localllm_backends.llamacpp.quantize import quantize

        quantize(order, on_planned)


backend_type = LlamaCppType()
