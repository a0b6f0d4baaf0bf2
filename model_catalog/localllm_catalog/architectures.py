"""What llama.cpp knows of each architecture that a GGUF header does not say: which of its layers
keep what.

From https://github.com/ggml-org/llama.cpp src/models/*.cpp (load_arch_hparams), read at b11434.
"""

from __future__ import annotations

# Architectures with sliding layers: (every nth layer is full, the first of n rather than the last,
# window if unstated).
SLIDING: dict[str, tuple[int, bool, int]] = {
    "gemma2": (2, False, 4096),
    "gemma3": (6, False, 0),
    "gemma3n": (5, False, 0),
    "gpt-oss": (2, False, 0),
    "cohere2": (4, False, 0),
    "cohere2moe": (4, True, 0),
    "exaone4": (4, False, 4096),
    "exaone-moe": (4, False, 128),
    "llama4": (4, False, 8192),
    "olmo2": (4, False, 0),
    "mellum": (4, False, 0),
    "muse-glimmer": (4, False, 0),
    "plamo3": (8, False, 0),
    "laguna": (4, True, 0),
    "smallthinker": (4, True, 4096),
    "afmoe": (4, False, 0),
}
# These state the pattern layer by layer, always.
SLIDING_STATED = frozenset(
    {
        "gemma4",
        "gemma4-assistant",
        "step35",
        "mimo2",
        "dots3note",
        "maple",
        "granite_swa",
        "spark2_5",
    },
)
FULL_EVERY = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
ZERO_HEADS_RECUR = frozenset(
    {
        "granitehybrid",
        "jamba",
        "plamo2",
        "lfm2",
        "lfm2moe",
        "kimi-linear",
        "kimi-k3",
        "bailingmoe3",
        "glm5-next",
    },
)
# Rows as wide as an indexer's key that it keeps per token (on layers that `attention.indexer.types`
# says have one).
INDEX_ROWS = {
    "qwen4exp": 1,
    "glm5-next": 3,
    "deepseek32": 1,
    "glm-dsa": 1,
    "hy_v4": 1,
    "minimax-m3": 1,
}
# On its leading dense layers too, except here.
NO_INDEX_WHERE_DENSE = frozenset({"minimax-m3"})
# DeepSeek V4: layers that keep every 4th token's row choose among them by an index.
INDEXED_RATIO = 4
COMPRESSED_WINDOW = 128
SPLIT_BLOCKS = frozenset({"nemotron_h", "nemotron_h_moe"})
ALL_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
NO_CACHE = frozenset(
    {"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert",
    "neo-bert", "eurobert",
     "t5encoder", "gemma-embedding"},
)  # fmt: skip
# Attention on every layer, with nothing special about its cache.
PLAIN = frozenset(
    {"llama", "mistral3", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl",
    "qwen3vlmoe", "phi2", "phi3",
     "phimoe", "gemma", "granite", "granitemoe", "smollm3", "glm4", "glm4moe", "chatglm",
     "deepseek", "deepseek2",
     "mistral4", "seed_oss", "starcoder", "starcoder2", "minimax-m2", "ernie4_5", "ernie4_5-moe",
     "hunyuan-dense",
     "hunyuan-moe", "command-r", "olmoe", "openelm", "deci", "exaone", "stablelm", "internlm2",
     "falcon", "gpt2",
     "gptneox", "bloom", "mpt", "baichuan", "dbrx", "grok", "minicpm", "minicpm3", "nemotron",
     "apertus", "arcee",
     "dots1", "bailingmoe", "bailingmoe2", "plamo", "refact", "orion", "xverse", "jais",
     "codeshell", "gptj", "qwen", "olmo",
     "arctic", "deepseek2-ocr", "bitnet", "jais2", "graniteswitch", "chameleon", "plm",
     "hunyuan_vl", "hy_v3", "grovemoe",
     "hrm_text", "cogvlm", "pangu-embedded", "paddleocr", "llama-embed", "maincoder", "talkie"},
)  # fmt: skip
KNOWN = (
    frozenset(SLIDING)
    | SLIDING_STATED
    | frozenset(FULL_EVERY)
    | ZERO_HEADS_RECUR
    | SPLIT_BLOCKS
    | ALL_RECURRENT
    | NO_CACHE
    | PLAIN
    | frozenset(INDEX_ROWS)
    | {"falcon-h1", "deepseek4"}
)

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
