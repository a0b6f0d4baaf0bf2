"""Cline, in the editor and in the terminal; Roo Code and Kilo Code have the same settings."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def cline(t: Target, home: Path) -> Recipe:
    """Cline keeps its settings inside the editor."""
    return Recipe(
        "Cline",
        steps=(
            "In Cline's settings choose the provider `OpenAI Compatible`.",
            f"Base URL: {t.url}/v1",
            f"API key: {t.key}",
            f"Model ID: {t.model}",
            f"Context window: {t.n_ctx}",
            f"In the terminal: cline auth -p openai-compatible -k {t.key} -m {t.model} -b {t.url}/v1",
        ),
        probes=("models", "chat", "tools", "ollama"),
        checked="CLI 3.0.65",
    )


def roo(t: Target, home: Path) -> Recipe:
    """Roo Code: as Cline, from which it comes."""
    return _in_the_editor("Roo Code", t)


def kilo(t: Target, home: Path) -> Recipe:
    """Kilo Code: as Cline, from which it comes."""
    return _in_the_editor("Kilo Code", t)


def _in_the_editor(name: str, t: Target) -> Recipe:
    steps = (
        f"In {name}'s settings add a profile with the API provider `OpenAI Compatible`.",
        f"Base URL: {t.url}/v1",
        f"API key: {t.key}",
        f"Model: {t.model}",
        f"Context window size: {t.n_ctx}; max output tokens: {t.answer_tokens}",
    )
    return Recipe(name, steps=steps, probes=("models", "chat", "tools"))
