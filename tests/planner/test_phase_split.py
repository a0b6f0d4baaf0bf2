"""Prefill on one machine and decode on another, predicted with the formulas of single machines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.device.name_lookup import resolve
from localllm.errors import DoesNotFitError, LocalLLMError, UsageError
from localllm.library.catalog import load_catalog
from localllm.planner import cluster, phase_split, speed
from localllm.planner.phase_split import PhaseSplit
from localllm.planner.types import RunSettings
from localllm_catalog.types import Model, Variant

SETTINGS = RunSettings(n_ctx=32_768, slots=1)
PROMPTS = (2048, 8192)
LINKS = cluster.LINKS


def model_file(name: str = "qwen3-32b", quant: str = "Q4_K_M") -> tuple[Model, Variant]:
    model = next(m for m in load_catalog().models if m.id == name)
    return model, next(v for v in model.variants if v.quant == quant and not v.is_folder)


def split(there: str, here: str, link: str = "10gbe") -> PhaseSplit:
    model, variant = model_file()
    others = [LINKS["1gbe"], LINKS["2.5gbe"]]
    return phase_split.plan(
        model, variant, SETTINGS, resolve(there), resolve(here), LINKS[link], others, PROMPTS
    )


def test_the_first_token_takes_as_long_as_computing_there_or_the_link() -> None:
    model, variant = model_file()
    spark = resolve("dgx spark")
    for link in ("1gbe", "10gbe", "connectx7"):
        found = split("dgx spark", "m4 max 128GB", link)
        both, there, here, layers = found.ways
        assert both.decode_tok_s == here.decode_tok_s
        for i, n_tokens in enumerate(PROMPTS):
            prefill = speed.prefill(spark, model, variant, SETTINGS, prompt_tokens=n_tokens)
            least_s = max(n_tokens / prefill.value, found.kv_bytes[i] / LINKS[link].bytes_per_s)
            ttft = both.ttft_s[i]
            assert least_s < ttft.value < 1.2 * least_s + 0.2
            assert ttft.low <= ttft.value <= ttft.high
        assert there.name.startswith("DGX Spark")
        assert layers.decode_tok_s.value < here.decode_tok_s.value


def test_with_a_slower_link_the_gain_begins_at_longer_prompts_or_never() -> None:
    found = split("dgx spark", "m4 max 128GB", "1gbe")
    pays = {link.name: n_tokens for link, n_tokens in found.pays_from}
    assert len(pays) == 2
    slow, fast = pays["1 Gbit/s Ethernet"], pays["2.5 Gbit/s Ethernet"]
    assert slow is not None
    assert fast is not None
    assert fast <= slow
    crawling = replace(LINKS["1gbe"], bytes_per_s=1e6)
    model, variant = model_file()
    machines = resolve("dgx spark"), resolve("m4 max 128GB")
    never = phase_split.plan(model, variant, SETTINGS, *machines, crawling, [], PROMPTS)
    assert never.pays_from == ((crawling, None),)


def test_a_link_faster_than_the_needed_one_gives_a_gain() -> None:
    model, variant = model_file()
    machines = resolve("dgx spark"), resolve("m4 max 128GB")
    needed = split("dgx spark", "m4 max 128GB").needed_bytes_s
    assert needed is not None
    for share, gains in ((0.9, False), (1.1, True)):
        link = replace(LINKS["10gbe"], bytes_per_s=share * needed)
        found = phase_split.plan(model, variant, SETTINGS, *machines, link, [], PROMPTS)
        both, _, here, _ = found.ways
        assert (both.ttft_s[-1].value < here.ttft_s[-1].value) == gains


def test_a_machine_with_no_faster_prefill_gains_over_no_link() -> None:
    found = split("m4 max 128GB", "dgx spark")
    assert found.needed_bytes_s is None
    assert {n_tokens for _, n_tokens in found.pays_from} == {None}


def test_the_command_prints_every_division_and_the_needed_link() -> None:
    asked = ["recommend", "--device", "dgx spark", "--with", "m4 max 128GB", "--link", "10gbe"]
    runner = CliRunner()
    shown = runner.invoke(app, [*asked, "-m", "qwen3-32b:Q4_K_M", "--explain"]).stdout
    for part in (
        "prefill there, decode here",
        "alone",
        "half of the layers on each",
        "pays from",
        "with 2.5 Gbit/s Ethernet",
        "gains over a link of",
        "overlapped in parts",
    ):
        assert part in shown, part
    found = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    assert len(found["ways"]) == 4
    assert found["needed_bytes_s"] > 0


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (["--with", "m4 max 128GB", "--link", "10gbe"], UsageError),
        (["--with", "m4 max 128GB", "--device", "dgx spark"], UsageError),
        (["--with", "m4 max 128GB", "--device", "dgx spark", "--link", "string"], UsageError),
        (
            ["--with", "m2 8GB", "--device", "dgx spark", "--link", "10gbe", "-m", "qwen3-32b"],
            DoesNotFitError,
        ),
    ],
)
def test_incomplete_questions_are_refused(asked: list[str], error: type[LocalLLMError]) -> None:
    assert isinstance(CliRunner().invoke(app, ["recommend", *asked]).exception, error)
