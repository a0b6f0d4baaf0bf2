"""The library as clients of the server may use it (`--allow-pull`): what they can fetch and remove by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.library.transfer import DownloadProgress
    from localllm.server.models.served import StoreProgress


@dataclass(frozen=True, slots=True)
class LibraryStore:
    """Implements server.models.installed.ModelStore. A reference is a name of the catalog or the hub, never a path."""

    offline: bool = False

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        """See ModelStore.pull."""
        from localllm.cli.compose.lookup import variant_choice
        from localllm.library.pull import pull
        from localllm.server.models.served import StoreProgress

        def hear(p: DownloadProgress) -> None:
            on_progress(StoreProgress(p.state, p.done_bytes, p.total_bytes, p.digest))

        name = _ours(ref)
        pull(name, on_progress=hear, choose=variant_choice(name), offline=self.offline, mmproj=True)

    def remove(self, ref: str) -> None:
        """See ModelStore.remove."""
        from localllm.library import store
        from localllm.library.resolve import resolve

        store.rm(resolve(_ours(ref), offline=True))


def _ours(ref: str) -> str:
    """`ref` as the library knows it: Ollama's `qwen3:8b` is the catalog's qwen3-8b. Raises UsageError for a path."""
    from localllm.library import hub, names
    from localllm.library.catalog import load_catalog

    names.parse(ref, hub_hosts=hub.hosts())
    ref = ref.removesuffix(":latest")
    family, colon, size = ref.partition(":")
    if colon and "/" not in ref:
        catalog = load_catalog()
        if catalog.get(family) is None and catalog.get(f"{family}-{size.lower()}") is not None:
            return f"{family}-{size.lower()}"
    return ref
