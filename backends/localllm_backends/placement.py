"""Placement of a model's parts in memory.

The planner chooses it and the backend applies it. Both use this type, so the module imports
neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Placement:
    """The memories that hold weights and KV.

    `gpu_layers`: this many last layers, including the output layer, are on the accelerators (-1 =
    all; 0 = use no accelerator).
    `experts_on_host`: the routed experts of this many first layers stay in system memory, even if
    the layer is on an accelerator (-1 = all layers).
    `tensor_split`: each accelerator's share of the layers, in order (empty: by free memory).
    `cards`: the accelerators to use, as indices in the order of PCI addresses (empty: all).
    `tensor_split` refers to these.
    `kv_on_host`: KV and attention stay in system memory.
    `weights`: "mapped" from the file, "read" into memory, or "auto".
    `tables`: rows of lookup tables come from "disk", "memory" or "auto".
    `layout`: "stored" = the processor multiplies weights in the file's layout; "auto" = the engine
    may repack them for the processor.
    `workers`: other machines (host:port). Their accelerators precede this machine's.
    """

    gpu_layers: int = -1
    experts_on_host: int = 0
    tensor_split: tuple[float, ...] = ()
    cards: tuple[int, ...] = ()
    kv_on_host: bool = False
    weights: Literal["auto", "mapped", "read"] = "auto"
    tables: Literal["auto", "disk", "memory"] = "auto"
    layout: Literal["auto", "stored"] = "auto"
    workers: tuple[str, ...] = ()

    @property
    def is_split(self) -> bool:
        """True if system memory holds data that every token needs, as far as the placement alone
        shows."""
        return self.gpu_layers >= 0 or self.experts_on_host != 0 or self.kv_on_host

    def first_gpu_layer(self, n_layers: int) -> int:
        """Return the index of the first of `n_layers` layers that the accelerators compute.

        `n_layers` = only the output layer; `n_layers` + 1 = no layer.
        """
        if self.gpu_layers < 0:
            return 0
        return max(0, n_layers + 1 - self.gpu_layers)

    def host_expert_layers(self, n_layers: int) -> int:
        """Return how many layers, counted from the first of `n_layers`, keep their routed experts
        in system memory."""
        if self.experts_on_host < 0:
            return n_layers
        return min(n_layers, self.experts_on_host)
