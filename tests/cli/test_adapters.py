"""`lora` adapters: planned with their bytes, refused by name before loading, and named in requests.

A request selects an adapter by model name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from localllm import paths
from localllm.cli.serve.model_router import router_of
from localllm.engine.worker import backends
from localllm.errors import LocalLLMError, UnsupportedError
from localllm.library import store
from localllm.load.load_plan import load_plan_named
from localllm.planner.bytes_per_token import streamed
from localllm.settings import Settings
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_gguf, tiny_lora, tiny_mlx
from models.tiny_bert import write_bert
from support.http_server import running_server

needs_mlx = pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_gguf.write_llama(tmp_path / "base.gguf")


def planned(model: Path, *lora: object) -> Any:
    settings = Settings({"context": 512, "draft": "off", "lora": [str(named) for named in lora]})
    return load_plan_named(str(model), settings)


@pytest.mark.parametrize(
    "engine", ["gguf", pytest.param("mlx", marks=[pytest.mark.mlx, needs_mlx])]
)
def test_the_plan_counts_an_adapters_bytes_and_the_named_adapter_is_loaded(
    engine: str, tmp_path: Path
) -> None:
    if engine == "mlx":
        model = tiny_mlx.write_llama(tmp_path / "base")
        laid = tiny_lora.write_mlx(tmp_path / "laid", model, rank=32)
    else:
        model = tiny_gguf.write_llama(tmp_path / "base.gguf")
        laid = tiny_lora.write(tmp_path / "laid.gguf", model, rank=32)
    loads = [planned(model), planned(model, f"{laid}:0.5")]
    sizes = []
    for load in loads:
        backend = backends.for_path(str(model)).load(LoadSpec.from_json(_sent(load.options.spec)))
        sizes.append(backend.memory().weights_bytes)
        backend.close()
    took = sizes[1] - sizes[0]
    assert took > 0.1 * sizes[0], "next to nothing: this would show nothing"
    plain, with_it = (load.plan for load in loads)
    assert with_it.memory.weights_bytes - plain.memory.weights_bytes == pytest.approx(
        took, rel=0.05
    )
    assert loads[1].needs_bytes - loads[0].needs_bytes == pytest.approx(took, rel=0.05)
    read, before = (streamed(p.model, p.variant).total_bytes for p in (with_it, plain))
    assert read - before == pytest.approx(took, rel=0.05)
    assert with_it.decode_tok_s.value < plain.decode_tok_s.value
    [adapter] = loads[1].options.spec.adapters
    assert (adapter.path, adapter.scale) == (str(laid), 0.5)


def _sent(spec: LoadSpec) -> Any:
    """Return `spec` as it reaches the worker."""
    import json
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(spec)))


@pytest.mark.parametrize(
    ("named", "scale"),
    [("x.gguf", 1.0), ("x.gguf:-2", -2.0), ("x.gguf:.25", 0.25), ("x:a.gguf", 1.0)],
)
def test_a_number_after_a_colon_is_the_scale_of_an_adapter(
    base: Path, named: str, scale: float
) -> None:
    file = named if named.endswith("gguf") else named.rpartition(":")[0]
    tiny_lora.write(base.parent / file, base)
    [adapter] = planned(base, base.parent / named).options.spec.adapters
    assert (adapter.path, adapter.scale) == (str(base.parent / file), scale)


def _missing(folder: Path, _: Path) -> str:
    return str(folder / "none.gguf:nan")


def _model(_: Path, base: Path) -> str:
    return str(base)


def _folder(folder: Path, _: Path) -> str:
    (folder / "laid").mkdir()
    return str(folder / "laid")


def _wide(folder: Path, _: Path) -> str:
    wide = tiny_gguf.write_llama(folder / "wide.gguf", e=128)
    return str(tiny_lora.write(folder / "laid.gguf", wide))


def _deep(folder: Path, _: Path) -> str:
    deep = tiny_gguf.write_llama(folder / "deep.gguf", layers=3)
    return str(tiny_lora.write(folder / "laid.gguf", deep))


def _of_experts(folder: Path, base: Path) -> str:
    return str(tiny_lora.write(folder / "laid.gguf", base, architecture="qwen3moe"))


def _tied(folder: Path, base: Path) -> str:
    tiny_gguf.write_sliding(base)
    return str(tiny_lora.write(folder / "laid.gguf", base, targets=["token_embd"]))


def _skewed(folder: Path, base: Path) -> str:
    return str(tiny_lora.write(folder / "laid.gguf", base, skewed=1))


def _empty(folder: Path, base: Path) -> str:
    laid = folder / "laid.gguf"
    w = gguf.GGUFWriter(str(laid), "llama")
    w.add_string("general.type", "adapter")
    w.add_string("adapter.type", "lora")
    tiny_gguf.finish(w, laid)
    return str(laid)


def _stating(**more: Any) -> Callable[[Path, Path], str]:
    def write(folder: Path, base: Path) -> str:
        keys = {key.replace("__", "."): value for key, value in more.items()}
        return str(tiny_lora.write(folder / "laid.gguf", base, more=keys))

    return write


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (_missing, "there is no such file or folder"),
        (_model, "no LoRA adapter"),
        (_folder, "adapters for base must be GGUF files, but this is a folder"),
        (_wide, "is 64 × 512 in this model, and the two matrices for it are 4 × 512 and 4 × 128"),
        (_deep, "changes blk.2.*, which this model does not have: it is another model's"),
        (_of_experts, "it is for qwen3moe models, and this one is llama"),
        (_tied, "is this model's output as well"),
        (_skewed, "or its ranks differ"),
        (_empty, "it changes no weights"),
        (_stating(adapter__type="control_vector"), "it is a control vector"),
        (_stating(adapter__alora__invocation_tokens=[1, 2]), "it is an aLoRA"),
    ],
)
def test_a_gguf_that_is_not_an_adapter_for_the_model_is_refused(
    write: Callable[[Path, Path], str], why: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=why) as e:
        planned(base, write(tmp_path, base))
    assert e.value.message.startswith("--lora ")
    assert "give an adapter that was trained for this model" in str(e.value.hint)


@pytest.mark.mlx
@needs_mlx
def test_a_folder_that_is_not_an_mlx_lm_adapter_for_the_model_is_refused(
    base: Path, tmp_path: Path
) -> None:
    model = tiny_mlx.write_llama(tmp_path / "model")
    full, peft = ({"fine_tune_type": "full"}, {"peft_type": "LORA"})
    refused = {
        "folders of mlx-lm's, and this is a file": tiny_lora.write(tmp_path / "laid.gguf", base),
        "another kind of fine-tune": tiny_lora.write_mlx(tmp_path / "full", model, config=full),
        "laid out as PEFT's": tiny_lora.write_mlx(tmp_path / "peft", model, config=peft),
        "it lacks what mlx-lm's adapters have": model,
    }
    for why, path in refused.items():
        with pytest.raises(UnsupportedError, match=why):
            planned(model, path)


def test_adapters_are_refused_for_embedding_models(tmp_path: Path, base: Path) -> None:
    vectors = write_bert(tmp_path / "vectors.gguf")
    with pytest.raises(UnsupportedError, match="generates embeddings, but adapters work only"):
        planned(vectors, tiny_lora.write(tmp_path / "laid.gguf", base))


def completion(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "a b c", "max_tokens": 8, "temperature": 0, **more}
    return http.post("/v1/completions", json={**body, "ignore_eos": True})


def text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def test_presets_with_adapters_are_models_of_their_own_over_one_copy_of_the_weights(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "library"
    folder.mkdir()
    base = tiny_gguf.write_llama(folder / "base.gguf")
    laid = tiny_lora.write(tmp_path / "laid.gguf", base)
    wrong = tiny_lora.write(tmp_path / "wrong.gguf", base, architecture="qwen3")
    store.adopt(folder)
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(
        f'[models.styled]\nmodel = "base"\nlora = ["{laid}"]\n'
        f'[models.faint]\nmodel = "base"\nlora = ["{laid}:0"]\n'
        f'[models.wrong]\nmodel = "base"\nlora = ["{wrong}"]\n'
    )
    models = router_of(["base"], (), Settings({"context": 512}))
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        said = {m: text(completion(http, m)) for m in ("base", "styled", "faint")}
        assert said["base"] == said["faint"] != said["styled"]
        assert len({models.resolve(name).worker for name in said}) == 1
        assert "it is for qwen3 models" in completion(http, "wrong").json()["error"]["message"]
        for model in said:
            assert text(completion(http, model, lora=[{"id": 0, "scale": 1.0}])) == said["styled"]
            assert text(completion(http, model, lora=[{"id": 0, "scale": 0}])) == said["base"]
            assert text(completion(http, model, lora=[])) == said[model]
        scales = {m: http.get(f"/lora-adapters?model={m}").json()[0]["scale"] for m in said}
        assert scales == {"base": 0.0, "styled": 1.0, "faint": 0.0}


@pytest.mark.mlx
@needs_mlx
def test_mlx_presets_share_one_copy_of_the_weights_unless_an_adapter_does_not_fit(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "library"
    base = tiny_mlx.write_4bit(folder / "base")
    config = {**tiny_mlx.LLAMA, "hidden_size": 128}
    wide = tiny_mlx.write(tmp_path / "wide-model", config)
    laid = {
        "formal": tiny_lora.write_mlx(tmp_path / "formal", base, seed=1),
        "short": tiny_lora.write_mlx(tmp_path / "short", base, seed=2),
        "wide": tiny_lora.write_mlx(tmp_path / "wide", wide),
    }
    store.adopt(folder)
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    (paths.config_dir() / "config.toml").write_text(
        "".join(f'[models.{n}]\nmodel = "base"\nlora = ["{path}"]\n' for n, path in laid.items())
    )
    models = router_of(["base"], (), Settings({"context": 512}))
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        said = {m: text(completion(http, m)) for m in ("base", "formal", "short")}
        assert len(set(said.values())) == 3, "equal answers would prove nothing"
        assert len({models.resolve(name).worker for name in said}) == 1
        for number, name in enumerate(("formal", "short")):
            own = [{"id": number, "scale": 1.0}]
            assert text(completion(http, "base", lora=own)) == said[name]
        assert "is not a LoRA adapter for this model" in completion(http, "wide").text
        assert text(completion(http, "base")) == said["base"]


def test_each_adapter_is_a_model_name_and_a_number_of_requests(tmp_path: Path) -> None:
    base = tiny_gguf.write_llama(tmp_path / "base.gguf")
    formal, short = (
        tiny_lora.write(tmp_path / f"{name}.gguf", base, seed=i)
        for i, name in enumerate(("formal", "short"))
    )
    settings = Settings({"context": 512, "only": True, "lora": [str(formal), f"{short}:0"]})
    models = router_of([str(base)], (), settings)
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        listed = [entry["id"] for entry in http.get("/v1/models").json()["data"]]
        assert listed == ["base", "formal", "short"]
        said = {model: text(completion(http, model)) for model in listed}
        assert said["base"] == said["formal"] != said["short"]
        of_short = [{"id": 1, "scale": 1.0}]
        assert text(completion(http, "base", lora=of_short)) == said["short"]
        native = {"prompt": "a b c", "n_predict": 8, "temperature": 0, "ignore_eos": True}
        answer = http.post("/completion", json={**native, "lora": of_short})
        assert answer.json()["content"] == said["short"]

        assert http.get("/lora-adapters").json() == [
            {"id": i, "path": f"{name}.gguf", "scale": scale, "task_name": "", "prompt_prefix": ""}
            for i, (name, scale) in enumerate([("formal", 1.0), ("short", 0.0)])
        ]
        assert http.post("/lora-adapters", json=of_short).json() == {"success": True}
        assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0.0, 1.0]
        assert text(completion(http, "base")) == said["short"]
        assert text(completion(http, "formal")) == said["formal"]


def test_an_adapter_that_is_not_loaded_is_a_400(tmp_path: Path) -> None:
    base = tiny_gguf.write_llama(tmp_path / "base.gguf")
    models = router_of([str(base)], (), Settings({"context": 512, "only": True}))
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert http.get("/lora-adapters").json() == []
        answer = completion(http, "base", lora=[{"id": 3, "scale": 1.0}])
        assert answer.status_code == 400
        assert "there is no adapter 3" in answer.json()["error"]["message"]
        for sent, why in (
            ([{"id": 0, "scale": 1.0}], "there is no adapter 0"),
            ({"id": 0, "scale": 1.0}, "the body must be a JSON array"),
            ([7], "a list of objects with id and scale"),
            ([{"id": 0}], "scale: is missing"),
        ):
            refused = http.post("/lora-adapters", json=sent)
            assert refused.status_code == 400
            assert why in refused.json()["error"]["message"]


def test_a_file_that_is_no_gguf_is_named(base: Path, tmp_path: Path) -> None:
    (tmp_path / "laid.gguf").write_text("<html>" * 50)
    with pytest.raises(LocalLLMError, match="this is a web page"):
        planned(base, tmp_path / "laid.gguf")
