"""The third place where bytes of a model can lie: tables of which a token reads a few rows stay in their file on the disk.

llama.cpp reads such tables row by row where they are larger than 4 GiB (llama-model-loader.cpp, lazy_read), through the
system's file cache: what of it is in memory can be taken back at any time, so none of it is counted as needed.
"""

from __future__ import annotations

from localllm.planner.types import RunSettings, backend_for
from localllm_catalog.types import Model, Variant

# What llama.cpp reads whole anyway.
LEAST_BYTES = 4 * 2**30
# Seconds a row takes that is not in memory. An SSD on PCIe answers 100,000 such reads a second and more (assumed; on a DGX
# Spark answers were as fast with Qwen3.8-Flash-Next's table cold as with it warm: github.com/0xBakeer/inference-atlas, pull
# requests 79 to 81); a disk that turns, a hundred.
ROW_S = 10e-6
SLOW_ROW_S = 10e-3


def table_bytes(model: Model, variant: Variant) -> int:
    """Bytes of the tables of `variant` that are looked up by rows beside the embedding of the tokens; 0 without any."""
    if not model.lookup_params:
        return 0
    if variant.input_bytes:  # read from the header, together with the tokens' own
        tokens = model.vocab_size * model.hidden_size
        return round(variant.input_bytes * model.lookup_params / (model.lookup_params + tokens))
    bits = model.lookup_bits or 8 * (variant.weights_bytes or variant.file_bytes) / max(1, model.params_total)
    return round(model.lookup_params * bits / 8)


def disk_bytes(model: Model, variant: Variant, settings: RunSettings) -> int:
    """Bytes that this run leaves on the disk; 0 where the engine reads everything."""
    where = settings.placement.tables
    if not model.lookup_params or where == "memory" or backend_for(variant) != "llamacpp":
        return 0
    found = table_bytes(model, variant)
    return found if where == "disk" or found > LEAST_BYTES else 0


def token_s(model: Model, variant: Variant, settings: RunSettings, *, row_s: float = ROW_S) -> float:
    """Seconds a token waits for its rows from the disk, when none of them is in memory."""
    return model.lookup_rows * row_s if disk_bytes(model, variant, settings) else 0.0
