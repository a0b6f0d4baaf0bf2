"""`recommend --fits TOKENS` lists the KV types, models and machines with which a long context
fits."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.device.name_lookup import resolve
from localllm.errors import UsageError
from localllm.planner import long_context
from localllm.planner.starting_settings import NO_OVERRIDES
from localllm_catalog import catalog

CATALOG = catalog.load()


def found(machine: str, model: str, tokens: int, *machines: str) -> long_context.LongContext:
    answer = long_context.find(
        resolve(machine),
        [resolve(name) for name in machines],
        [CATALOG.by_id[name] for name in (model, "qwen3-4b-instruct-2507")],
        CATALOG.by_id[model],
        tokens,
        NO_OVERRIDES,
    )
    assert answer is not None
    return answer


def test_a_smaller_kv_type_another_model_or_more_memory_hold_more_tokens() -> None:
    answer = found(
        "RTX 3060 12GB", "llama-3.1-8b-instruct", 131_072, "RTX 5090", "RTX 4060", "RTX 3090"
    )
    longest = [choice.max_ctx for choice in answer.choices]
    assert [choice.kv_type for choice in answer.choices] == ["f16", "q8_0", "q4_0"]
    assert longest == sorted(longest)
    assert longest[0] < 131_072
    assert answer.others
    assert all(plan.settings.n_ctx >= 131_072 for plan in answer.others)
    assert answer.machine is not None
    machine, plan = answer.machine
    assert machine.name == resolve("RTX 3090").name, "the least that holds it with room"
    assert plan.settings.n_ctx >= 131_072


def test_no_machine_holds_more_tokens_than_a_model_is_trained_for() -> None:
    answer = found("RTX 5090", "qwen3-8b", 1_048_576, "M3 Ultra 512GB")
    assert answer.machine is None
    assert max(choice.max_ctx for choice in answer.choices) < 1_048_576


def test_the_command_prints_the_answer_and_its_json() -> None:
    runner = CliRunner()
    asked = ["recommend", "--device", "RTX 3090", "-m", "llama-3.1-8b-instruct", "--fits", "64k"]
    text = runner.invoke(app, asked)
    assert text.exit_code == 0, text.output
    assert "What makes 65,536 tokens of context fit" in text.output
    assert "KV cache f16" in text.output
    assert "least machine for Llama 3.1 8B Instruct" in text.output
    answer = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    assert answer["tokens"] == 65_536
    assert answer["machine"]["needs_bytes"] > 4e9
    beyond = runner.invoke(app, [*asked[:-1], "1M"]).output
    assert "trained for 131,072 tokens: no KV type is enough" in beyond
    assert "least machine" not in beyond


@pytest.mark.parametrize("text", ["1Q", "", "0", "-3", "1e9", "999999M"])
def test_an_invalid_number_of_tokens_is_refused(text: str) -> None:
    asked = ["recommend", "--device", "RTX 3090", "--fits", text or " "]
    assert isinstance(CliRunner().invoke(app, asked).exception, UsageError)
