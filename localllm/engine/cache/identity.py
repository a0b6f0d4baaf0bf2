"""The identity of KV: everything that gives its bytes their meaning, except the tokens before it.

It does not name a build. Builds and machines with the same identity may exchange KV, in files and
over the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from localllm.engine.adapters import adapted_weights
from localllm_backends.contract import Backend, BackendFailure

# The version of the format of KV files (kv_file.py). It is part of the layout, so servers of
# different versions use different folders and do not remove each other's files.
FILE_FORMAT = 6
_NAMES = {
    "weights": "the model's weights or applied adapters",
    "kv_type_k": "the KV type of keys",
    "kv_type_v": "the KV type of values",
    "shape": "the division of KV into pieces and states",
    "layout": "the layout of KV",
}


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """`weights`: the fingerprint of weights and tokenizer, and of the adapters if the KV is sent to
    another server (in the cache, the adapters are part of the salt). `shape`: the kinds of blocks
    that the model's KV is divided into. `layout`: the format of files and `ModelInfo.kv_layout`."""

    weights: str
    kv_type_k: str
    kv_type_v: str
    shape: str
    layout: str

    @property
    def kind(self) -> str:
        """The common beginning of the names of this model's KV with these types."""
        return f"{self.weights}-{self.kv_type_k}-{self.kv_type_v}-"

    @property
    def name(self) -> str:
        """The identity as a text that can be the name of a folder."""
        layout = hashlib.blake2b(self.layout.encode(), digest_size=8).hexdigest()
        return f"{self.kind}{self.shape}-{layout}"

    def with_adapters(self, name: str) -> KvIdentity:
        """The identity of KV that the set of adapters called `name` computed (engine/adapters.py)."""
        return replace(self, weights=adapted_weights(self.weights, name))

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_json(cls, sent: Mapping[str, Any]) -> KvIdentity:
        """The identity in `sent`. Raises BackendFailure for other data."""
        if set(sent) != set(_NAMES) or not all(isinstance(v, str) for v in sent.values()):
            raise BackendFailure("the data is not the identity of a KV cache")
        return cls(**sent)

    def difference(self, other: KvIdentity) -> str:
        """The parts that differ, in words; "" if the KV may be exchanged."""
        theirs = other.to_json()
        parts = [_NAMES[part] for part, value in self.to_json().items() if value != theirs[part]]
        return ", ".join(parts)


def identity_of(backend: Backend) -> KvIdentity:
    """The identity of the KV that `backend` exports and imports."""
    info = backend.info
    capabilities = backend.capabilities
    if capabilities.states:
        shape = "states"
    elif capabilities.segments:
        shape = "parts"
    else:
        shape = "snapshots"
    layout = f"file format {FILE_FORMAT}, {info.kv_layout}"
    return KvIdentity(info.fingerprint, info.kv_type_k, info.kv_type_v, shape, layout)
