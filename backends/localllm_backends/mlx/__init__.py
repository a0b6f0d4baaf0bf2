"""The MLX backend: mlx-lm checkpoint folders, run by mlx and mlx-lm. Importing this module loads
neither."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm_backends.backend_type import BackendType
from localllm_backends.declaration import Declaration
from localllm_backends.failures import BackendFailure
from localllm_backends.installed_packages import version

if TYPE_CHECKING:
    from localllm_backends.contract import Backend, LoadSpec, QuantizeOrder

# The compiler that MLX's CPU build calls for its kernels (mlx/backend/cpu/jit_compiler.cpp runs
# `g++` on Linux).
_CPU_COMPILER = "g++"


# Packages with MLX's CUDA code. It also needs the driver's libcuda, or MLX computes on the CPU.
_CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")


def needs_compiler(
    platform: str, which: Callable[[str], str | None], *, cuda: bool = False
) -> bool:
    """Return whether MLX compiles kernels for the CPU at run time, and its compiler is not on
    PATH."""
    return platform == "linux" and not cuda and which(_CPU_COMPILER) is None


def _has_cuda() -> bool:
    from ctypes.util import find_library

    installed = any(version(package) for package in _CUDA_PACKAGES)
    return installed and find_library("cuda") is not None


class MlxType(BackendType):
    declaration = Declaration(
        name="mlx",
        label="MLX",
        formats=("mlx",),
        files="MLX folders",
        accelerators=("metal",),
        packages=("mlx", "mlx-lm"),
        own_kernels=True,
        buffers="grown",
        kv_quants="groups",
        trained_drafters=True,
        adapters="folder",
        towers=(
            "devstral-small-2",
            "gemma-3-",
            "gemma-4-26b",
            "gemma-4-31b",
            "gemma-4-e",
            "ministral-3-",
            "mistral-small-3",
            "qwen3-vl-8b",
            "qwen3.5-",
            "qwen3.6-",
            "qwen3.8-27b",
        ),
        snapshots=True,
        tensor_parallel=True,
        # mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`: head sizes 192 and 256
        # (faster unfused, by its comment) and sizes without a kernel compute a full score matrix.
        # An M5 on macOS 26.2 has a kernel for 256 in steps of at least 1,024 tokens (MLX from
        # August 2026). A prompt's last step is smaller, so the peak memory is the same.
        fused_heads=(64, 80, 128),
        # The limit in stepping.py for attention with a full score matrix.
        scores_at_once=512 * 65_536,
    )

    def available(self) -> str | None:
        """Return None if mlx and mlx-lm can be imported and can compute here.

        Otherwise return the missing part and how to install it.
        """
        for module in ("mlx", "mlx_lm"):
            if importlib.util.find_spec(module) is None:
                package = module.replace("_", "-")
                return f"{package} is not installed: run `pip install 'localllm[mlx]'`"
        if needs_compiler(sys.platform, shutil.which, cuda=_has_cuda()):
            return (
                "MLX on a Linux CPU compiles its kernels while it runs "
                f"and needs the C++ compiler `{_CPU_COMPILER}` on PATH: "
                "install it (Debian, Ubuntu: `apt install g++`)"
            )
        return None

    def accepts(self, path: str) -> bool:
        """Return True for a folder with config.json and safetensors weights, or for one of those
        weight files."""
        from localllm_backends.mlx.files import checkpoint_folder

        folder = checkpoint_folder(path)
        return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))

    def vocabulary(self, path: str) -> list[bytes]:
        from localllm_backends.mlx.files import checkpoint_folder
        from localllm_backends.mlx.vocabulary import MlxVocabulary, read_json
        from localllm_backends.plain_files import check_plain_files

        folder = checkpoint_folder(path)
        check_plain_files(folder)
        config = read_json(folder / "config.json")
        text = config.get("text_config", config)
        words = MlxVocabulary(folder, config, int(text.get("vocab_size", 0)))
        return [words.token_bytes(t, special=True) for t in range(words.n_vocab)]

    def image_bytes(self, path: str) -> int:
        from localllm_backends.mlx.files import checkpoint_folder
        from localllm_backends.mlx.towers import has_tower, image_buffer_bytes, unsupported_reason
        from localllm_backends.mlx.vocabulary import read_json

        folder = checkpoint_folder(path)
        config = read_json(folder / "config.json")
        if not has_tower(folder, config):
            return 0
        reason = unsupported_reason(config)
        if reason is not None:
            raise BackendFailure(reason)
        return image_buffer_bytes(config)

    def prepare(self) -> None:
        import localllm_backends.mlx.load  # noqa: F401

    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        from localllm_backends.mlx.load import load
        from localllm_backends.mlx.tensor_parallel import load_tensor_parallel

        if spec.placement.workers:
            return load_tensor_parallel(spec, on_progress)
        if spec.projector:
            from localllm_backends.mlx.vision import load_with_vision

            return load_with_vision(spec, on_progress)
        return load(spec, on_progress)

    def quantize(self, order: QuantizeOrder, on_planned: Callable[[int], None]) -> None:
        from localllm_backends.mlx.quantize import quantize

        quantize(order, on_planned)


backend_type = MlxType()
