"""Options that several commands take, each with its one help."""

from __future__ import annotations

from typing import Annotated

import typer


def installed_names(typed: str) -> list[str]:
    """What is on this disk and begins as `typed`, for the shell to complete."""
    from localllm.library import store

    try:
        return sorted({local.name for local in store.scan() if local.name.startswith(typed)})
    except OSError:
        return []


GpuLayers = Annotated[str | None, typer.Option(metavar="N|all", help="Layers on the GPU (default: as many as fit).")]
CpuMoe = Annotated[str | None, typer.Option(metavar="N|all", help="Layers whose experts stay in system memory.")]
Split = Annotated[str | None, typer.Option(metavar="A,B", help="Each GPU's share of the layers.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
