"""Every installed model on request, presets of config.toml, and names with wildcards.

The tests use the real engine.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest

from localllm import paths
from localllm.cli.serve.model_router import router_of
from localllm.cli.serve.presets import KEYS, load_presets
from localllm.cli.serve.served_models import planned_model
from localllm.engine.messages import Generation, Sampling
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import DoesNotFitError, ModelNotFoundError, UsageError
from localllm.library import store
from localllm.load.load_plan import load_plan_named
from localllm.server.generation.chat import ChatRequest
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.worker import ModelWorker
from localllm.server.serving import with_defaults
from localllm.settings import Settings
from models.tiny_bert import write_bert
from support.http_server import running_server
from support.until import until

HI = [{"role": "user", "content": "Say hi"}]


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a folder of four installed models."""
    made = tmp_path / "library"
    made.mkdir()
    for name in ("alpha-Q4_0", "beta-Q8_0", "beta-Q4_0", "gpt-oss-mini"):
        shutil.copy(tiny_model, made / f"{name}.gguf")
    store.adopt(made)
    return made


def config(text: str) -> None:
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(text)


def router(
    *names: str, only: bool = False, aliases: tuple[str, ...] = (), **flags: Any
) -> ModelRouter:
    return router_of(names, aliases, Settings({"context": 512, "only": only, **flags}))


def ask(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {
        "model": model,
        "prompt": "a",
        "max_tokens": 2,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }
    return http.post("/v1/completions", json=body)


def states(http: httpx.Client) -> dict[str, str]:
    return {m["id"]: m["status"]["value"] for m in http.get("/v1/models").json()["data"]}


@pytest.fixture
def http(folder: Path) -> Iterator[httpx.Client]:
    models = router("alpha-Q4_0")
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def test_every_installed_model_is_listed_and_loads_when_it_is_named(http: httpx.Client) -> None:
    before = states(http)
    assert {"alpha-Q4_0", "beta-Q8_0", "beta-Q4_0", "gpt-oss-mini"} <= set(before)
    assert set(before.values()) == {"unloaded"}
    # Each model's plan is computed in the background.
    until(lambda: {m["context_length"] for m in http.get("/v1/models").json()["data"]} == {512})
    for name in ("gpt-oss-mini", "GPT-OSS-MINI.gguf", "gpt-oss-mini:latest"):
        assert ask(http, name).json()["usage"]["completion_tokens"] == 2, name
    assert ask(http, "beta:Q8_0").json()["model"] == "beta-Q8_0"
    # If two models match a name, the loaded one answers.
    assert ask(http, "beta").json()["model"] == "beta-Q8_0"
    after = states(http)
    assert {n for n, s in after.items() if s == "loaded"} == {"gpt-oss-mini", "beta-Q8_0"}


def test_an_unknown_model_is_a_404_with_similar_and_available_names(http: httpx.Client) -> None:
    reply = ask(http, "gpt-oss-mimi")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "model_not_found"
    assert "beta-Q8_0" in error["message"]
    assert "gpt-oss-mini" in error["hint"]


def test_no_request_reaches_a_file_by_its_path(
    http: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "alpha-Q4_0.gguf", tmp_path / "elsewhere.gguf")
    for name in (str(tmp_path / "elsewhere.gguf"), str(folder / "beta-Q8_0.gguf"), "../elsewhere.gguf", "~/x.gguf",
                 "https://huggingface.co/org/name", "file:///etc/passwd", "\0", "a" * 500):  # fmt: skip
        assert ask(http, name).status_code == 404, name


def test_a_model_installed_while_the_server_runs_is_found(http: httpx.Client, folder: Path) -> None:
    shutil.copy(folder / "alpha-Q4_0.gguf", folder / "newcomer.gguf")
    # The disk is read at most once a second.
    until(lambda: ask(http, "newcomer").status_code == 200)
    assert ask(http, "newcomer").json()["model"] == "newcomer"


def test_an_installed_embedding_model_is_recognised_when_it_is_requested(folder: Path) -> None:
    write_bert(folder / "vectors.gguf")
    with (
        running_server(router("alpha-Q4_0")) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        reply = http.post("/v1/embeddings", json={"model": "vectors", "input": "hello"})
        assert reply.status_code == 200, reply.text
        assert ask(http, "vectors").status_code == 400


def test_only_offers_the_named_model_under_all_of_its_names(
    folder: Path,
) -> None:
    models = router("alpha-Q4_0", only=True)
    assert [m.name for m in models.list()] == ["alpha-Q4_0"]
    assert {models.resolve(n).name for n in ("alpha", "alpha:Q4_0", "alpha-Q4_0.gguf")} == {
        "alpha-Q4_0"
    }
    with pytest.raises(ModelNotFoundError, match="served: alpha-Q4_0"):
        models.resolve("beta-Q8_0")


def test_two_requests_for_one_model_wait_for_one_load(folder: Path) -> None:
    models = router("alpha-Q4_0")
    with (
        running_server(models) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        replies = list(pool.map(lambda _: ask(http, "gpt-oss-mini"), range(4)))
        assert [r.status_code for r in replies] == [200] * 4
        host = models.resolve("gpt-oss-mini").worker.host
        assert isinstance(host, Supervisor)
        assert host.loads == 1


def test_a_loaded_model_is_unloaded_for_another_only_while_idle(folder: Path) -> None:
    models = router("alpha-Q4_0")
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert ask(http, "alpha-Q4_0").status_code == 200
        assert models.admission is not None
        models.admission.limit_bytes = models.resolve("alpha-Q4_0").facts.needs_bytes + 1
        assert ask(http, "gpt-oss-mini").status_code == 200
        assert {n for n, s in states(http).items() if s == "loaded"} == {"gpt-oss-mini"}
        refused = asyncio.run(
            _while_held(models.resolve("gpt-oss-mini"), lambda: ask(http, "alpha-Q4_0"))
        )
        assert refused.status_code == 503
        assert "in use: gpt-oss-mini" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert ask(http, "alpha-Q4_0").status_code == 200


async def _while_held(model: ServedModel, ask_: Callable[[], httpx.Response]) -> httpx.Response:
    with model.lease():
        return await asyncio.to_thread(ask_)


# --- names ----------------------------------------------------------------------------------------


def test_wildcard_aliases_match_unknown_names_and_the_most_specific_wins(folder: Path) -> None:
    models = router(
        "alpha-Q4_0",
        "beta-Q8_0",
        aliases=("claude-*", "gpt-*=beta-Q8_0", "claude-haiku-*=gpt-oss-mini"),
    )
    named = {
        n: models.resolve(n).name
        for n in ("claude-sonnet-4-5", "gpt-5", "GPT-4o-mini", "claude-haiku-4-5")
    }
    assert named == {
        "claude-sonnet-4-5": "alpha-Q4_0", "gpt-5": "beta-Q8_0", "GPT-4o-mini": "beta-Q8_0",
        "claude-haiku-4-5": "gpt-oss-mini",
    }  # fmt: skip
    # A pattern does not hide a model of the same name.
    assert models.resolve("gpt-oss-mini").name == "gpt-oss-mini"
    with pytest.raises(ModelNotFoundError):
        models.resolve("mistral-large")
    with pytest.raises(UsageError, match="must be NAME=MODEL"):
        router("alpha-Q4_0", aliases=("fast=nothing",))


# --- presets --------------------------------------------------------------------------------------

PRESETS = """
[models.alpha-Q4_0]
top_k = 7

[models.coder]
model = "alpha-Q4_0"
temperature = 0.125
system = "Answer in capitals."
aliases = ["claude-*"]

[models.long]
model = "alpha-Q4_0"
context = 1024
idle_unload_min = 0.5
"""


def test_presets_are_separate_models_that_share_a_worker_if_possible(folder: Path) -> None:
    config(PRESETS)
    models = router("alpha-Q4_0", context=None)
    alpha, coder, long = (models.resolve(n) for n in ("alpha-Q4_0", "claude-opus-4", "long"))
    assert [m.name for m in (alpha, coder, long)] == ["alpha-Q4_0", "coder", "long"]
    assert coder.worker is alpha.worker
    assert long.worker is not alpha.worker
    assert long.worker.idle_s == 30
    assert (alpha.sampling.top_k, coder.sampling.top_k) == (7, 7)
    assert (alpha.sampling.temperature, coder.sampling.temperature) == (0.8, 0.125)
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert ask(http, "coder").json()["model"] == "coder"
        now = states(http)
        assert (now["alpha-Q4_0"], now["coder"], now["long"]) == ("loaded", "loaded", "unloaded")
        assert ask(http, "long").status_code == 200
        windows = {m["id"]: m["context_length"] for m in http.get("/v1/models").json()["data"]}
        assert windows["long"] == 1024
        assert windows["coder"] == windows["alpha-Q4_0"] != 1024
        assert models.resolve("coder").worker.host is models.resolve("alpha-Q4_0").worker.host
        params = http.get("/props", params={"model": "coder"}).json()[
            "default_generation_settings"
        ]["params"]
        assert (params["temperature"], params["top_k"]) == (0.125, 7)


def test_a_presets_system_text_is_used_if_the_conversation_has_none(folder: Path) -> None:
    config(PRESETS)
    with (
        running_server(router("coder")) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):

        def prompt(model: str, *messages: dict[str, str]) -> str:
            body = {"model": model, "messages": [*messages, *HI]}
            text: str = http.post("/apply-template", json=body).json()["prompt"]
            return text

        assert "Answer in capitals." in prompt("coder")
        assert "Answer in capitals." not in prompt(
            "coder", {"role": "system", "content": "Be brief."}
        )
        assert "Answer in capitals." not in prompt("alpha-Q4_0")


def test_a_presets_thinking_budget_applies_if_the_request_has_none(folder: Path) -> None:
    config(
        '[models.brief]\nmodel = "alpha-Q4_0"\nthinking_budget = 64\n[models.free]\nmodel = '
        '"alpha-Q4_0"\nthinking_budget = -1\n'
    )
    models = router("alpha-Q4_0")
    asked = ChatRequest([{"role": "user", "content": "a"}], Generation(thinking_tokens=5))
    silent = ChatRequest([{"role": "user", "content": "a"}], Generation())
    brief, free = models.resolve("brief").defaults, models.resolve("free").defaults
    assert with_defaults(silent, brief).generation.thinking_tokens == 64
    assert with_defaults(asked, brief).generation.thinking_tokens == 5
    assert with_defaults(silent, free) == silent


def test_a_flag_overrides_a_presets_settings(folder: Path) -> None:
    config(PRESETS)
    models = router("long", context=2048)
    assert models.resolve("long").facts.n_ctx == 2048


def test_a_preset_whose_model_is_not_installed_is_left_out(folder: Path) -> None:
    config('[models.ghost]\nmodel = "no-such-model-anywhere"\n')
    assert "ghost" not in {m.name for m in router("alpha-Q4_0").list()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[models.x]\ntemprature = 1\n", "temprature"),
        ("[models.x]\ntemperature = 'hot'\n", "temperature"),
        ("[models.x]\ntop_p = 2\n", "top_p"),
        ("[models.x]\nkv_type = 'q3'\n", "kv_type"),
        ("[models.x]\naliases = 'a'\n", "aliases"),
        ("[models.x]\nsystem = 1\n", "system"),
        ("[models.x]\nidle_unload_min = -1\n", "idle_unload_min"),
        ("[models.x]\nthinking_budget = true\n", "thinking_budget"),
        ("models = 3\n", "models"),
        *(
            (f"[models.x]\n{name} = 1e30\n", name)
            for name in get_type_hints(Sampling)
            if name in KEYS
        ),
        ("[models.x]\nrepeat_penalty = 0\n", "repeat_penalty"),
        ("[models.x]\ntop_k = -2\n", "top_k"),
    ],
)
def test_an_error_in_a_preset_names_its_key(text: str, says: str) -> None:
    config(text)
    with pytest.raises(UsageError) as caught:
        load_presets()
    assert says in caught.value.message
    if says == "temprature":
        assert caught.value.hint == "did you mean temperature?"


def test_a_preset_accepts_the_same_values_as_a_request() -> None:
    config("[models.x]\ntop_k = -1\nrepeat_last_n = -1\nseed = -1\nrepeat_penalty = 0.001\n")
    (preset,) = load_presets()
    assert preset.sampling == {
        "top_k": -1,
        "repeat_last_n": -1,
        "seed": -1,
        "repeat_penalty": 0.001,
    }


def test_every_key_of_a_preset_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in text] == []


@pytest.mark.long
def test_a_load_that_runs_out_of_memory_is_retried_once_with_less_memory_and_reported(
    smollm2: Path,
) -> None:
    load = load_plan_named(str(smollm2), Settings({"context": 4096}))
    # A KV cache that no machine can hold: at least 90 GB in one allocation.
    spec = replace(load.options.spec, n_ctx=1 << 22)
    model = planned_model(replace(load, options=replace(load.options, spec=spec)))
    worker = ModelWorker("m", model)

    async def story() -> int:
        engine = await worker.engine()
        assert await engine.tokenize("here it is")
        await worker.close()
        return engine.info.n_ctx

    assert asyncio.run(story()) == 4096
    assert "4,096 tokens of context instead of 4,194,304" in worker.notice

    nothing_less = replace(load, options=replace(load.options, spec=spec), smaller=lambda: None)
    with pytest.raises(DoesNotFitError, match="context of 4194304 tokens"):
        asyncio.run(planned_model(nothing_less).host.engine())


def test_a_retried_load_takes_10_percent_less_memory_and_is_not_retried_again(
    smollm2: Path,
) -> None:
    load = load_plan_named(str(smollm2), Settings())
    less = load.smaller()
    assert load.plan is not None
    assert less is not None
    assert less.plan is not None
    assert less.plan.memory.total_bytes <= 0.9 * load.plan.memory.total_bytes
    assert less.smaller() is None
    chosen = load_plan_named(
        str(smollm2), Settings({"context": 4096, "kv_type": "f16", "parallel": 1})
    )
    assert chosen.smaller() is None, "what was chosen by hand stays"


def test_a_cut_file_is_not_offered_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = folder / "delta-Q8_0.gguf"
    cut.write_bytes((folder / "alpha-Q4_0.gguf").read_bytes()[:-1000])
    offered = router("alpha-Q4_0")
    assert "delta-Q8_0" not in [model.name for model in offered.list()]
    assert [cut.name in line for line in caplog.messages].count(True) == 1
