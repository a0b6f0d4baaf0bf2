"""What the planner asks of a model over and over, counted once: equal layers grouped, parameters by role."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from localllm_catalog import shapes
from localllm_catalog.remembered import by_identity
from localllm_catalog.types import Layer, Model


@dataclass(frozen=True, slots=True)
class Facts:
    """`groups`: (layer, how many like it). Parameters are counts: `dense_params` are read by every token, of the
    routed experts `chosen_params` by one and `pool_params` exist; `embedding_params` are rows looked up, never streamed.
    `recurrent_state_bytes` is what one sequence's recurrent layers hold."""

    groups: tuple[tuple[Layer, int], ...]
    n_layers: int
    n_expert_layers: int
    n_recurrent_layers: int
    dense_params: int
    chosen_params: int
    pool_params: int
    embedding_params: int
    recurrent_state_bytes: int
    has_mla: bool
    is_stateful: bool

    def kv_elements(self, depth: int) -> int:
        """KV elements one sequence of `depth` tokens holds: each sliding layer at most its window."""
        total = 0
        for layer, count in self.groups:
            held = min(depth, layer.window) if layer.kind == "sliding" and layer.window else depth
            total += count * held * shapes.layer_kv_elements(layer)
        return total


@by_identity
def facts(model: Model) -> Facts:
    """The facts of `model`, counted on the first call."""
    n_experts = sum(layer.ffn in ("experts", "both") for layer in model.layers) if model.experts else 0
    chosen = pool = 0
    if model.experts is not None:
        x = model.experts
        one = n_experts * model.ffn_matrices * (x.latent_size or model.hidden_size) * x.intermediate
        chosen, pool = one * x.n_active, one * x.n_experts
    _, active = shapes.count_params(model)
    kinds = {layer.kind for layer in model.layers}
    return Facts(
        groups=tuple(Counter(model.layers).items()),
        n_layers=len(model.layers),
        n_expert_layers=n_experts,
        n_recurrent_layers=sum(layer.kind == "recurrent" for layer in model.layers),
        dense_params=active - chosen,
        chosen_params=chosen,
        pool_params=pool,
        embedding_params=0 if model.tied_embeddings else model.vocab_size * model.hidden_size,
        recurrent_state_bytes=shapes.recurrent_state_bytes(model),
        has_mla="mla" in kinds,
        is_stateful=bool(kinds & {"sliding", "recurrent"}),
    )
