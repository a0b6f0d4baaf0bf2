"""Connecting editors.

Configurations name the real server, files lose no data, and checks detect faults.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.clients.agents import AGENTS
from localllm.cli.chat.engines import address_and_key
from localllm.cli.commands.connect import connect
from localllm.cli.editors.checks import run_checks
from localllm.cli.editors.configuring import (
    outdated_numbers,
    print_steps,
    target_of,
    warn,
    write_file,
)
from localllm.cli.editors.recipes import (
    RECIPES,
    ClientTarget,
    ConfigFile,
    Probe,
    assignment,
    recipe_named,
)
from localllm.cli.serve import running
from localllm.cli.serve.api_keys import key_path, stored_or_new_key
from localllm.engine.messages import Failure, Request
from localllm.errors import LocalLLMError, NotFoundError, ServerUnreachableError, UsageError
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ServedModel
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine, grammar_of

TARGET = ClientTarget("http://127.0.0.1:11535", "tiny", 4096)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_the_server_and_the_model(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name](TARGET, tmp_path)
    said = " ".join(
        [*(f.shown() for f in recipe.files), *recipe.steps, *recipe.environment.values()]
    )
    if name == "cursor":
        assert "cloud" in said
        assert not recipe.files
        return
    assert "127.0.0.1:11535" in said
    assert "tiny" in said or name in ("open-webui",)
    assert all(f.path.is_relative_to(tmp_path) for f in recipe.files)


def test_the_recipe_for_continue_has_a_role_for_every_served_model(tmp_path: Path) -> None:
    def text(target: ClientTarget) -> str:
        (file,) = RECIPES["continue"](target, tmp_path).files
        return file.text or ""

    three = text(replace(TARGET, autocomplete="fim", embedding="bert"))
    assert [line.strip() for line in three.splitlines() if "roles" in line or "model:" in line] == [
        'model: "tiny"', "roles: [chat, edit, apply]", 'model: "fim"', "roles: [autocomplete]",
        'model: "bert"',
        "roles: [embed]",
    ]  # fmt: skip
    assert "roles: [chat, edit, apply, autocomplete]" in text(replace(TARGET, autocomplete="tiny"))
    assert "--also" in RECIPES["continue"](TARGET, tmp_path).steps[0]


_QUOTES = "'\u2018\u2019\u201a\u201b"
HOSTILE = (
    "$(touch ran)", "`touch ran`", "a; touch ran #", "'; touch ran; '", '"; touch ran; "',
    "a' \\'; touch ran; '\\", "x\\", "\u2019; touch ran; \u2018", "&& touch ran", "~/*", "a b",
)  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_output_for_a_shell_is_quoted_for_that_shell(name: str, tmp_path: Path) -> None:
    """Output for a shell is valid for that shell: every model name is quoted correctly.

    This covers variables and commands.
    """
    plain = RECIPES[name](TARGET, tmp_path)
    for model in HOSTILE:
        recipe = RECIPES[name](replace(TARGET, model=model, shell="sh"), tmp_path)
        lines = [assignment(n, v, "sh") for n, v in recipe.environment.items()]
        expected = [*recipe.environment.values()]
        lines += [f'printf "%s\\0" "${n}"' for n in recipe.environment]
        for step, usual in zip(recipe.steps, plain.steps, strict=True):
            _, is_command, words = usual.partition(": ")
            if is_command and " -" in words and "tiny" in words:
                lines.append(f'printf "%s\\0" {step.partition(": ")[2]}')
                expected += [word.replace("tiny", model) for word in shlex.split(words)]
        done = subprocess.run(["sh", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True)
        assert done.stdout.decode().split("\0")[:-1] == expected, model
        assert not done.stderr
        assert not [*tmp_path.iterdir()]
        for n, v in recipe.environment.items():
            line = assignment(n, v, "powershell")
            inner = re.fullmatch(rf"\$env:{n} = '((?:[^{_QUOTES}]|([{_QUOTES}])\2)*)'", line)
            assert inner is not None, line
            assert re.sub(rf"([{_QUOTES}])\1", r"\1", inner[1]) == v


def test_a_model_name_with_control_characters_is_refused() -> None:
    for hidden in ("a\nexport PATH=/x", "a\x1b[2J", "a\u202eb", "a\u2028b"):
        with running_server({hidden: ScriptedEngine()}) as server:
            with pytest.raises(LocalLLMError, match="control characters") as refused:
                connect("zed", None, server.url, None, False, False)
            assert hidden not in str(refused.value)


def test_the_target_comes_from_the_server() -> None:
    fim = ScriptedEngine(fim_tokens={"pre": 1, "suf": 2, "mid": 3})
    models = [
        ServedModel("bert", ScriptedEngine(), embeds=True),
        ServedModel("chat", ScriptedEngine()),
        ServedModel("fim", fim, info=fim.info),
    ]
    with running_server(models) as server:
        target = target_of(f"{server.url}/v1", None, None)
    assert (target.model, target.autocomplete, target.embedding) == ("chat", "fim", "bert")


def test_codex_gets_a_profile_file_that_is_toml(tmp_path: Path) -> None:
    (file,) = RECIPES["codex"](TARGET, tmp_path).files
    profile = tomllib.loads(file.text or "")
    provider = profile["model_providers"]["localllm"]
    auth = provider.pop("auth")
    assert provider == {
        "name": "localllm",
        "base_url": "http://127.0.0.1:11535/v1",
        "wire_api": "responses",
    }
    for key in (None, "secret"):
        environment = {**os.environ, "LOCALLLM_API_KEY": key or ""}
        said = subprocess.run(
            [auth["command"], *auth["args"]],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout.strip() == (key or "local")


def test_writing_a_file_keeps_other_settings_and_a_backup(tmp_path: Path) -> None:
    (file,) = RECIPES["zed"](TARGET, tmp_path).files
    file.path.parent.mkdir(parents=True)
    file.path.write_text('{"theme": "One", "language_models": {"openai": {"x": 1}}}')
    assert "wrote" in write_file(file)
    settings = json.loads(file.path.read_text())
    assert settings["theme"] == "One"
    assert settings["language_models"]["openai"] == {"x": 1}
    assert "localllm" in settings["language_models"]["openai_compatible"]
    (backup,) = file.path.parent.glob("*.bak")
    assert json.loads(backup.read_text())["theme"] == "One"
    assert "up to date" in write_file(file)
    assert file.path.stat().st_mode & 0o077 == 0


def test_a_symbolic_link_is_followed_and_the_backup_is_in_the_targets_folder(
    tmp_path: Path,
) -> None:
    (file,) = RECIPES["zed"](TARGET, tmp_path).files
    target = tmp_path / "dotfiles" / "zed.json"
    target.parent.mkdir()
    target.write_text('{"theme": "One"}')
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.symlink_to(target)
    write_file(file)
    assert file.path.is_symlink()
    assert json.loads(target.read_text())["theme"] == "One"
    assert len(list(target.parent.glob("*.bak"))) == 1


def test_a_list_in_a_file_keeps_the_entries_of_other_programs(tmp_path: Path) -> None:
    (file,) = RECIPES["vscode"](TARGET, tmp_path).files
    file.path.parent.mkdir(parents=True)
    file.path.write_text('[{"name": "other"}, {"name": "localllm", "old": true}]')
    write_file(file)
    assert [(e["name"], "old" in e) for e in json.loads(file.path.read_text())] == [
        ("other", False),
        ("localllm", False),
    ]


@pytest.mark.parametrize("old", ['{\n  // mine\n  "a": 1\n}', "{broken"])
def test_a_file_with_comments_is_not_changed(tmp_path: Path, old: str) -> None:
    (file,) = RECIPES["zed"](TARGET, tmp_path).files
    file.path.parent.mkdir(parents=True)
    file.path.write_text(old)
    with pytest.raises(UsageError, match="comments"):
        write_file(file)
    assert file.path.read_text() == old


def test_an_existing_yaml_file_is_not_changed(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / "config.yaml", text="ours: 1\n")
    file.path.write_text("theirs: 1\n")
    with pytest.raises(UsageError, match="exists"):
        write_file(file)


def test_checks_make_the_editors_calls(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(script=lambda r: ['{"text": "x"}'] if grammar_of(r) else ["Hi there"])
    with running_server({"tiny": engine}) as server:
        for name in RECIPES:
            connect(name, None, server.url, None, False, True)
        assert "FAILED" not in capsys.readouterr().out
        with pytest.raises(NotFoundError, match="tiny"):
            connect("zed", "gone", server.url, None, False, False)
        with pytest.raises(NotFoundError, match="known"):
            connect("emacs", None, server.url, None, False, False)
        engine.script = [Failure("", "worker_died", "gone")]
        with pytest.raises(LocalLLMError, match="3 of Zed's calls failed"):
            connect("zed", None, server.url, None, False, True)
        assert "503" in capsys.readouterr().out


# With a fault, the model fails at the tool's result.
@pytest.mark.parametrize("probe", ["tools", "responses", "anthropic", "ollama"])
@pytest.mark.parametrize("fault", ["", "second"])
def test_a_check_runs_a_complete_tool_loop(
    probe: Probe, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Request) -> list[Any]:
        if grammar_of(request):
            return ['{"text": "hi"}']
        assert isinstance(request.prompt, str)
        if "noted" in request.prompt and fault == "second":
            return [Failure("", "worker_died", "gone")]
        return ["Done."]

    engine = ScriptedEngine(script)
    with running_server({"tiny": engine}) as server:
        failures = run_checks(ClientTarget(server.url, "tiny", 4096), [probe])
    said = capsys.readouterr().out
    assert failures == (fault == "second"), said
    loop = "Ollama tool loop" if probe == "ollama" else "tool loop"
    assert (f"FAILED  {loop} " in said) == (fault == "second")
    prompts = [r.prompt for r in engine.requests if isinstance(r.prompt, str)]
    assert any("noted" in p and '"text": "hi"' in p for p in prompts), (
        "the call and its result never came back"
    )


def test_claude_code_gets_every_model_and_the_context_length(tmp_path: Path) -> None:
    small = RECIPES["claude"](TARGET, tmp_path).environment
    assert {small[f"ANTHROPIC_DEFAULT_{size}_MODEL"] for size in ("HAIKU", "SONNET", "OPUS")} == {
        "tiny"
    }
    assert (small["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], small["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == (
        "4096",
        "1024",
    )
    # Claude Code treats a compaction window below 100,000 tokens as a mistake.
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in small
    large = RECIPES["claude"](replace(TARGET, n_ctx=131_072), tmp_path).environment
    assert large["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"


def test_a_context_too_small_for_the_clients_own_prompt_causes_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warned(n_ctx: int, max_context: int = 0) -> str:
        target = ClientTarget("http://127.0.0.1:1", "tiny", n_ctx, max_context=max_context)
        warn(RECIPES["claude"](target, tmp_path))
        return capsys.readouterr().err

    assert "--context" in warned(4096)
    assert "65536 is the largest" in warned(4096, 65_536)
    assert "--context 20000 (20000 is the largest" in warned(4096, 20_000)
    # The limit may be the model's own, however much memory is free.
    assert "another agent or model: no --context is large enough (8192" in warned(4096, 8192)
    assert "the model and the memory allow" in warned(4096, 8192)
    assert warned(65_536) == ""


@pytest.mark.parametrize("name", ["claude-code", "Claude-Code", "codex-cli", "mini-swe-agent"])
def test_a_program_s_own_name_finds_its_recipe(name: str, tmp_path: Path) -> None:
    assert recipe_named(name)(TARGET, tmp_path).name.lower().replace(" ", "-") == name.lower()


def test_recipes_name_the_client_versions_that_the_benchmark_runs(tmp_path: Path) -> None:
    pinned = {a.recipe: a.version for a in AGENTS if a.recipe}
    measured = {name: recipe_of(TARGET, tmp_path).checked for name, recipe_of in RECIPES.items()}
    checked = {name: version for name, version in measured.items() if version}
    assert len(checked) > 8
    assert checked.items() <= pinned.items()


def test_a_recipe_that_was_not_checked_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server({"tiny": ScriptedEngine()}) as server:
        connect("goose", None, server.url, None, False, False)
        assert "not checked here" in capsys.readouterr().err
        connect("codex", None, server.url, None, False, False)
        assert "not checked here" not in capsys.readouterr().err


def test_the_stored_key_that_the_server_generated_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ScriptedEngine(script=lambda r: ['{"text": "x"}'] if grammar_of(r) else ["Hi there"])
    secured = replace(ServerSettings(host="0.0.0.0").secured(), api_key=stored_or_new_key())
    with (
        running_server({"tiny": engine}, api_key=stored_or_new_key()) as server,
        running.published(secured, urlsplit(server.url).port or 0),
    ):
        connect("codex", None, server.url, None, False, True)
        said = capsys.readouterr().out
        assert "FAILED" not in said
        assert f"export LOCALLLM_API_KEY={stored_or_new_key()}" in said
        with pytest.raises(UsageError, match="rejects the key"):
            connect("codex", None, server.url, "another", False, False)
        elsewhere = server.url.replace("127.0.0.1", "nas.lan")
        assert address_and_key(elsewhere, None) == (f"{elsewhere}/v1", None)
    with running_server({"tiny": engine}) as server:
        connect("codex", None, server.url, None, False, False)
        assert stored_or_new_key() not in capsys.readouterr().out, (
            "a server that asks for none needs none"
        )


def test_no_key_is_generated_if_none_is_stored() -> None:
    with running_server({"tiny": ScriptedEngine()}, api_key="mine") as server:
        with pytest.raises(UsageError, match="requires a key"):
            connect("zed", None, server.url, None, False, False)
        assert not key_path().exists()


def test_a_server_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(ServerUnreachableError, match="no server answers"):
        connect("zed", None, "http://127.0.0.1:9", None, False, False)


def test_the_running_server_is_found_on_any_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server({"tiny": ScriptedEngine()}) as server:
        port = urlsplit(server.url).port or 0
        with running.published(ServerSettings(port=port), port):
            connect("zed")
    assert f":{port}/v1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["continue", "mistral-vibe", "opencode", "qwen"])
def test_our_own_file_is_rewritten_for_another_context(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n_ctx in (65_536, 4096):
        recipe = RECIPES[name](replace(TARGET, n_ctx=n_ctx), tmp_path)
        print_steps(recipe, "sh", write=False)
        if n_ctx == 4096:
            assert "is for other settings of the server" in capsys.readouterr().err
        for file in recipe.files:
            write_file(file)
            assert outdated_numbers(file) == []
            assert file.text in (None, file.path.read_text())


def test_a_file_written_by_the_user_is_not_replaced(tmp_path: Path) -> None:
    (file,) = RECIPES["continue"](TARGET, tmp_path).files
    file.path.parent.mkdir(parents=True)
    file.path.write_text("name: mine\n")
    assert outdated_numbers(file) == []
    with pytest.raises(UsageError, match="already exists"):
        write_file(file)


def test_a_shell_with_variables_for_another_context_causes_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "65536")
    print_steps(RECIPES["claude"](TARGET, tmp_path), "sh", write=False)
    assert "(65536 instead of 4096)" in capsys.readouterr().err
    monkeypatch.setenv("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "4096")
    print_steps(RECIPES["claude"](TARGET, tmp_path), "sh", write=False)
    assert "instead of" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["claude", "codex", "copilot", "opencode", "qwen"])
def test_a_context_without_room_for_the_client_s_own_prompt_is_a_warning(
    name: str, tmp_path: Path
) -> None:
    assert RECIPES[name](replace(TARGET, n_ctx=4096), tmp_path).warning
    assert not RECIPES[name](replace(TARGET, n_ctx=65_536), tmp_path).warning
