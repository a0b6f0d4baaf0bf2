"""llama.cpp's facts about architectures and file types that a GGUF header does not state. (layers/
reads the layers of an architecture.)

From https://github.com/ggml-org/llama.cpp src/models/*.cpp (load_arch_hparams), read at b11434.
"""

from __future__ import annotations

# More than any model has. Headers and configs are untrusted.
MAX_LAYERS = 2_048
MAX_TOKENS = 1 << 40

# Encoders, which keep no cache of earlier tokens.
NO_CACHE = frozenset(
    {"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert",
    "neo-bert", "eurobert",
     "t5encoder", "gemma-embedding"},
)  # fmt: skip
# The first release of llama.cpp that reads an architecture, if it is newer than 0.5.0
# (https://github.com/ggml-org/llama.cpp/releases, November 2026).
FIRST_RELEASES = {"lfm3": "1.0", "xing4_0": "1.0"}
# general.file_type (llama.cpp include/llama.h, enum llama_ftype).
FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip

TOKENIZERS = {"qwen35": "qwen3.5", "llama-bpe": "llama3-bpe", "smollm": "smollm2"}
