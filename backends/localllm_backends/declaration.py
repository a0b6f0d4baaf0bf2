"""Facts about a backend that are known before it is loaded, for the planner and the command
line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Declaration:
    """Facts about a backend. The defaults suit an engine about which no more is known.

    `name`: name of the entry point. `label`: common name of the engine.
    `formats`: file formats of the catalog that it runs. `files`: these formats in words.
    `accelerators`: kinds of device that plans may use (localllm.device.accelerators; () = all).
    `packages`: distributions that affect its speed.
    `library_variable`: environment variable with a folder of libraries that run instead of those in
    the first of `packages`.

    Facts for the planner:

    `own_kernels`: its speeds are stored under its own name instead of the accelerator's.
    `buffers`: memory for a step is "planned" when the context is created, or "grown" when steps
    need it.
    `kv_quants`: quantised KV in "blocks" of 32 along a row, or in "groups" of one head and not in
    sliding windows.
    `splits`: layers and experts can be in several memories.
    `mixed_kv`: keys and values may have different types, on a processor.
    `host_embedding`: the token embedding stays in system memory.
    `disk_tables`: lookup tables may stay on disk.
    `repacks_weights`: weights can be repacked for the processor.
    `spare_sequence`: one sequence is kept in addition to the served ones.
    `draft_heads`: it runs the model's own draft heads (MTP), which published files include.
    `trained_drafters`: it runs drafters trained for a model, in the formats of its models.
    `adapters`: a LoRA adapter is a "file" or a "folder" ("": not supported).
    `projectors`: it reads images with a projector file.
    `towers`: prefixes of catalog ids of models whose images it reads with the vision encoder in
    their own files.
    `snapshots`: recurrent states are kept for drafting.
    `tensor_parallel`: several machines can share each layer.
    `fused_heads`: head sizes with fused attention, which keeps no score matrix in prefill. Only for
    "grown" buffers.
    `scores_at_once`: limit for attention with a score matrix, in new tokens times all tokens per
    call. A larger step is computed in pieces (0 = no limit).
    """

    name: str
    label: str
    formats: tuple[str, ...]
    files: str = ""
    accelerators: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    library_variable: str = ""
    own_kernels: bool = False
    buffers: Literal["planned", "grown"] = "planned"
    kv_quants: Literal["blocks", "groups"] = "blocks"
    splits: bool = False
    mixed_kv: bool = False
    host_embedding: bool = False
    disk_tables: bool = False
    repacks_weights: bool = False
    spare_sequence: bool = False
    draft_heads: bool = False
    trained_drafters: bool = False
    adapters: Literal["", "file", "folder"] = ""
    projectors: bool = False
    towers: tuple[str, ...] = ()
    snapshots: bool = False
    tensor_parallel: bool = False
    fused_heads: tuple[int, ...] = ()
    scores_at_once: int = 0

    def runs_on(self, accelerator: str) -> bool:
        return not self.accelerators or accelerator in self.accelerators
