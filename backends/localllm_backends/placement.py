"""Where the parts of a model lie. The planner chooses it and a backend is told it: one type for
both, which imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights and KV lie.

    `gpu_layers`: the last so many layers, the output counted as one, are the accelerators' (-1 =
    all; 0 = no accelerator is used at all). Of them the routed experts of the model's first
    `experts_on_host` layers stay in system memory all the same (-1 = of all). `tensor_split`: each
    accelerator's share of the layers, in order (empty: by free memory).
    `cards`: the accelerators that are used, by their places in the order of PCI addresses (empty:
    all); shares are of those.
    `kv_on_host`: KV and attention stay in system memory. `weights`: "mapped" from the file, "read"
    into memory, or "auto". `tables`: rows of lookup tables from "disk", "memory" or
    "auto".
    `layout`: "stored" = the processor multiplies weights as they lie in the file, also those that
    the engine would lay out anew for it ("auto").
    `workers`: other machines (host:port), whose accelerators come before this one's.
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
        """True where part of what a token needs is in system memory, as far as the placement alone
        tells."""
        return self.gpu_layers >= 0 or self.experts_on_host != 0 or self.kv_on_host

    def first_gpu_layer(self, n_layers: int) -> int:
        """The index of the first of `n_layers` that the accelerators compute; `n_layers` = only the
        output, and `n_layers` + 1 = nothing."""
        if self.gpu_layers < 0:
            return 0
        return max(0, n_layers + 1 - self.gpu_layers)

    def host_expert_layers(self, n_layers: int) -> int:
        """Of the first how many of `n_layers` the routed experts are kept in system memory."""
        if self.experts_on_host < 0:
            return n_layers
        return min(n_layers, self.experts_on_host)
