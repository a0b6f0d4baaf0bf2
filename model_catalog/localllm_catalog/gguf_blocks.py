"""The layers of a GGUF file: the tensors of each, with the header's numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from localllm_catalog.gguf import GgufHeader, TensorInfo
from localllm_catalog.gguf_facts import Facts

BLOCK_TENSOR = re.compile(r"blk\.([0-9]{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """The tensors of one block by their short name ("attn_q.weight")."""

    tensors: Mapping[str, TensorInfo]

    def has(self, name: str) -> bool:
        """Return whether the block has weights of this name."""
        return f"{name}.weight" in self.tensors

    def has_experts(self) -> bool:
        """Return whether the block has routed experts."""
        return any(tensor.is_expert for tensor in self.tensors.values())

    def n_bytes(self) -> tuple[int, int]:
        """Return (bytes that each token reads, bytes of routed experts)."""
        experts = sum(tensor.n_bytes for tensor in self.tensors.values() if tensor.is_expert)
        return sum(tensor.n_bytes for tensor in self.tensors.values()) - experts, experts

    def mixer_elements(self) -> int:
        """Return the number of weights of the token mixer: all but the feed-forward's."""
        return sum(
            tensor.n_elements
            for name, tensor in self.tensors.items()
            if not name.startswith("ffn_")
        )


@dataclass(frozen=True, slots=True)
class GgufLayer:
    """One layer: the header's numbers, the layer's tensors, and its index in the model."""

    facts: Facts
    block: BlockTensors
    index: int

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.facts.heads[self.index]

    @property
    def n_kv_heads(self) -> int:
        """Heads whose keys and values are cached; 0 if the layer has no attention."""
        return self.facts.kv_heads[self.index]

    @property
    def v_is_k(self) -> bool:
        """True if the layer has no projection of its own for values."""
        block = self.block
        return bool(block.tensors) and not (block.has("attn_v") or block.has("attn_qkv"))


def blocks(header: GgufHeader, n_layers: int) -> list[BlockTensors]:
    """Return the blocks of the first `n_layers` layers. A block is empty if the file has no tensors
    for it."""
    tensors_by_block: defaultdict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for tensor in header.tensors:
        match = BLOCK_TENSOR.fullmatch(tensor.name)
        if match is not None:
            tensors_by_block[int(match[1])][match[2]] = tensor
    return [BlockTensors(tensors_by_block.get(index, {})) for index in range(n_layers)]
