"""What each editor and agent needs to use this server: one file for each program, its configuration as data.

Sources: each program's own documentation (zed.dev/docs/ai, code.visualstudio.com/docs/agent-customization/language-models,
docs.continue.dev, opencode.ai/docs/providers, developers.openai.com/codex/config-advanced, code.claude.com/docs/env-vars,
aider.chat/docs, docs.openwebui.com, llm.datasette.io, `copilot help providers`, and the documentation inside the packages
of Qwen Code and pi), read in November 2026. `Recipe.checked` says which were also run (benchmarks/clients).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from localllm.cli.editors.aider import aider
from localllm.cli.editors.claude import claude
from localllm.cli.editors.cline import cline, kilo, roo
from localllm.cli.editors.codex import codex
from localllm.cli.editors.continue_dev import continue_
from localllm.cli.editors.copilot_cli import copilot
from localllm.cli.editors.crush import crush
from localllm.cli.editors.cursor import cursor
from localllm.cli.editors.goose import goose
from localllm.cli.editors.jetbrains import jetbrains
from localllm.cli.editors.llm import llm
from localllm.cli.editors.mini_swe import mini
from localllm.cli.editors.mistral_vibe import vibe
from localllm.cli.editors.open_webui import open_webui
from localllm.cli.editors.opencode import opencode
from localllm.cli.editors.pi import pi
from localllm.cli.editors.qwen_code import qwen
from localllm.cli.editors.recipe import ConfigFile, Probe, Recipe, Target
from localllm.cli.editors.vscode import vscode
from localllm.cli.editors.xcode import xcode
from localllm.cli.editors.zed import zed

__all__ = ["RECIPES", "ConfigFile", "Probe", "Recipe", "Target"]

RECIPES: Mapping[str, Callable[[Target, Path], Recipe]] = {
    "codex": codex, "claude": claude, "opencode": opencode, "aider": aider, "continue": continue_, "cline": cline,
    "roo": roo, "kilo": kilo, "zed": zed, "vscode": vscode, "copilot": copilot, "jetbrains": jetbrains, "qwen": qwen,
    "pi": pi, "mistral-vibe": vibe, "mini-swe": mini, "crush": crush, "goose": goose, "open-webui": open_webui,
    "llm": llm, "xcode": xcode, "cursor": cursor,
}  # fmt: skip
