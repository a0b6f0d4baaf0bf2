"""What a backend says of itself before anything of it is loaded: all that the planner and the
command line need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Declaration:
    """Facts of a backend. The defaults are those of an engine of which nothing more is known.

    `name`: its entry point's;
    `label`: the engine as people call it.
    `formats`: the catalog's formats of files that it runs, and `files` such files in words.
    `accelerators`: kinds of device it is planned for (localllm.device.accelerators; () = all).
    `packages`: the distributions that its speed depends on.

    What the planner reckons with: `own_kernels`, its speeds are filed under its name and not under
    the accelerator's;
    `buffers`, whether memory for a step is "planned" when the context is made or "grown" as steps
    need it;
    `kv_quants`, quantised KV in "blocks" of 32 along a row, or in "groups" of a head and not in
    sliding windows.
    `splits`: layers and experts can lie in several memories.
    `mixed_kv`: keys and values may be of two types, on a processor.
    `host_embedding`: the token embedding stays in the host's memory.
    `disk_tables`: lookup tables may stay on the disk.
    `lays_out`: weights can be laid out anew for the processor.
    `spare_sequence`: one is kept beside those served.
    `draft_heads`: it runs the model's own (MTP), which published files carry.
    `adapters`: a LoRA adapter of it is a "file" or a "folder" ("": it takes none).
    `projectors`: it reads images by a projector's file.
    `towers`: how the ids of the catalog's models begin whose images it reads by what lies in their
    own files.
    `snapshots`: recurrent states are kept for drafting.
    `tensor_parallel`: machines can share each layer.
    `fused_heads`: sizes of heads whose attention over a prompt's tokens holds no scores, where
    buffers are grown, and
    `scores_at_once`: new tokens times all tokens that one call attends with where it does hold
    them; beyond, a step is computed in pieces (0 = never).
    """

    name: str
    label: str
    formats: tuple[str, ...]
    files: str = ""
    accelerators: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    own_kernels: bool = False
    buffers: Literal["planned", "grown"] = "planned"
    kv_quants: Literal["blocks", "groups"] = "blocks"
    splits: bool = False
    mixed_kv: bool = False
    host_embedding: bool = False
    disk_tables: bool = False
    lays_out: bool = False
    spare_sequence: bool = False
    draft_heads: bool = False
    adapters: Literal["", "file", "folder"] = ""
    projectors: bool = False
    towers: tuple[str, ...] = ()
    snapshots: bool = False
    tensor_parallel: bool = False
    fused_heads: tuple[int, ...] = ()
    scores_at_once: int = 0

    def runs_on(self, accelerator: str) -> bool:
        return not self.accelerators or accelerator in self.accelerators
