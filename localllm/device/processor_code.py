"""Compare the instructions that the installed llama.cpp was compiled for with this processor's.

Ready wheels are compiled for many processors, so they leave out instructions that some have.
"""

from __future__ import annotations

from localllm.device.ggml import GgmlBuild
from localllm.device.health import HealthCheck
from localllm.device.types import Device

# ggml's names of CPU features, by the widest vectors of a processor.
_FEATURES = {"AVX2": ("AVX2", "FMA", "F16C"), "AVX-512": ("AVX512", "AVX2", "FMA", "F16C")}


def processor_checks(device: Device, build: GgmlBuild | None) -> list[HealthCheck]:
    """Return a check of the CPU code.

    The list is empty if models run on a GPU, or if the build did not list its CPU features.
    """
    if build is None or build.failure or build.gpus:
        return []
    build_features = build.features.get("CPU", {})
    if not build_features:
        return []
    name = "llama.cpp CPU code"
    wanted_features = list(_FEATURES.get(device.cpu_vectors, ()))
    if device.os == "Linux":
        wanted_features.append("OPENMP")
    missing = [feature for feature in wanted_features if build_features.get(feature, "0") == "0"]
    if not missing:
        if not wanted_features:
            return []
        return [HealthCheck(name, "ok", f"compiled with {', '.join(wanted_features)}")]
    message = (
        f"the installed llama.cpp does not use {', '.join(missing)} of this machine: compiled here, "
        "it computes prompts faster (with a C++ compiler, some minutes)"
    )
    return [HealthCheck(name, "warning", message, "localllm setup --backend cpu")]
