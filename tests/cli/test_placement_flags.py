"""--gpu-layers, --cpu-moe and --split apply to both the plan and the loaded model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.device.name_lookup import resolve
from localllm.errors import UsageError
from localllm.load.load_plan import load_plan_named
from localllm.load.offload import check_offload, offload_options
from localllm.load.options import load_spec, run_settings
from localllm.planner.placement_search import OffloadOptions
from localllm.settings import Settings
from localllm_backends.placement import Placement
from models import tiny_gguf


@pytest.mark.parametrize(
    ("said", "placed"),
    [
        ({}, Placement()),
        ({"gpu_layers": "7"}, Placement(gpu_layers=7)),
        ({"gpu_layers": "all", "cpu_moe": "all"}, Placement(gpu_layers=-1, experts_on_host=-1)),
        ({"cpu_moe": "auto"}, Placement()),
        (
            {"cpu_moe": "12", "split": "3, 1"},
            Placement(experts_on_host=12, tensor_split=(3.0, 1.0)),
        ),
    ],
)
def test_flags_become_a_placement(said: dict[str, str], placed: Placement) -> None:
    run = run_settings(None, Settings(said))
    assert run.placement == placed
    spec = load_spec("model.gguf", run)
    assert (spec.n_gpu_layers, spec.placement.experts_on_host) == (
        placed.gpu_layers,
        placed.experts_on_host,
    )
    assert spec.placement.tensor_split == placed.tensor_split


@pytest.mark.parametrize(
    "said", [{"gpu_layers": "most"}, {"cpu_moe": "-3"}, {"split": "a,b"}, {"split": "0,0"}]
)
def test_an_invalid_number_is_refused_with_the_flags_name(said: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(said))):
        offload_options(Settings(said))


def test_the_layers_of_draft_heads_are_counted_as_gpu_layers() -> None:
    run = run_settings(None, Settings({"gpu_layers": "7"}))
    assert load_spec("m.gguf", run, n_mtp_layers=1).n_gpu_layers == 8
    none, every = (run_settings(None, Settings({"gpu_layers": n})) for n in ("0", "all"))
    assert load_spec("m.gguf", none, n_mtp_layers=1).n_gpu_layers == 0
    assert load_spec("m.gguf", every, n_mtp_layers=1).n_gpu_layers == -1


def test_placement_flags_are_in_the_plan_and_in_the_spec(tmp_path: Path) -> None:
    path = tiny_gguf.write_moe(tmp_path / "moe.gguf")
    load = load_plan_named(str(path), Settings({"context": 512, "cpu_moe": "1", "gpu_layers": "0"}))
    assert load.plan is not None
    assert load.plan.settings.placement == Placement(gpu_layers=0, experts_on_host=1)
    assert (load.options.spec.n_gpu_layers, load.options.spec.placement.experts_on_host) == (0, 1)


@pytest.mark.parametrize(
    ("machine", "asked"),
    [
        ("Ryzen 9 7950X 64GB", OffloadOptions(gpu_layers=3)),
        ("RTX 4090", OffloadOptions(tensor_split=(1.0, 1.0))),
    ],
)
def test_a_placement_that_the_machine_lacks_is_refused_with_the_machines_name(
    machine: str, asked: OffloadOptions
) -> None:
    device = (
        replace(resolve("RTX 4090"), name="a processor", accelerator="cpu")
        if "Ryzen" in machine
        else resolve(machine)
    )
    with pytest.raises(UsageError, match=device.name):
        check_offload(asked, device)
    assert check_offload(OffloadOptions(gpu_layers=-1, experts_on_host=2), device)


def test_recommend_accepts_placement_flags_for_any_machine() -> None:
    said = [
        "recommend",
        "--device",
        "RTX 4090",
        "--ram",
        "128",
        "-m",
        "gpt-oss-120b",
        "--cpu-moe",
        "30",
        "--json",
    ]
    result = CliRunner().invoke(app, said, catch_exceptions=False)
    assert result.exit_code == 0
    plans = json.loads(result.stdout)["plans"]
    assert {plan["placement"]["experts_on_host"] for plan in plans} == {30}
    assert plans[0]["fits"] == "split"


def test_a_split_between_workers_needs_no_local_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split between remote workers needs no local GPU."""
    device = replace(resolve("RTX 4090"), name="a processor", accelerator="cpu")
    monkeypatch.setattr("localllm.device.detect.detect", lambda: device)
    path = str(tiny_gguf.write_moe(tmp_path / "moe.gguf"))
    there = {"context": 512, "workers": ("10.0.0.8:50052", "10.0.0.9:50052")}
    placed = load_plan_named(
        path, Settings({**there, "split": "3,1", "gpu_layers": "1"})
    ).options.spec
    assert placed.placement.tensor_split == (3.0, 1.0)
    assert placed.placement.workers == there["workers"]
    assert placed.n_gpu_layers == 1
    plain = load_plan_named(path, Settings(there)).options.spec
    assert (plain.n_gpu_layers, plain.placement.tensor_split) == (-1, ())
    with pytest.raises(UsageError, match="3 shares"):
        load_plan_named(path, Settings({**there, "split": "3,1,1"}))
