"""VS Code's Copilot Chat."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def vscode(t: Target, home: Path) -> Recipe:
    """VS Code's Copilot Chat: a custom endpoint."""
    entry = {
        "name": "localllm",
        "vendor": "customendpoint",
        "apiKey": t.key,
        "apiType": "chat-completions",
        "models": [
            {
                "id": t.model,
                "name": f"{t.model} (this machine)",
                "url": f"{t.url}/v1/chat/completions",
                "toolCalling": True,
                "vision": False,
                "maxInputTokens": t.n_ctx - t.answer_tokens,
                "maxOutputTokens": t.answer_tokens,
            }
        ],
    }
    return Recipe(
        "VS Code",
        (ConfigFile(home / ".config/Code/User/chatLanguageModels.json", {"": [entry]}, merge_list_by="name"),),
        (
            "Run `Chat: Manage Language Models` and make the model visible.",
            f'Older releases have an Ollama provider: "github.copilot.chat.byok.ollamaEndpoint": "{t.url}".',
        ),
        ("models", "chat", "tools", "ollama"),
    )
