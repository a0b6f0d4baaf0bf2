"""Watts and joules from the counters of machines, or no figure if there is no counter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.commands.bench import lines
from localllm.device.parsers.power import EnergyCounter, rapl, used_j
from localllm.device.probes.power import PowerMeter

PACKAGE = ("package-0\n", "53012345678\n", "262143328850\n")
DRAM = ("dram\n", "1000000\n", "65712999613\n")
CORE = ("core\n", "4000000\n", "262143328850\n")
PSYS = ("psys\n", "90000000\n", "262143328850\n")


def test_nested_rapl_domains_count_once() -> None:
    zones = {"intel-rapl:0": PACKAGE, "intel-rapl:0:0": CORE, "intel-rapl:0:1": DRAM}
    assert [zone.name for zone in rapl(zones)] == ["package-0", "dram"]
    assert rapl(zones)[0].joules == pytest.approx(53012.345678)
    assert [zone.name for zone in rapl({**zones, "intel-rapl:1": PSYS})] == ["psys"]
    assert rapl({"intel-rapl:0": ("package-0\n", None, "262143328850\n")}) == []  # not root
    assert rapl({}) == []


def test_a_power_counter_that_wrapped_around_is_handled() -> None:
    before, after = (
        [EnergyCounter("package-0", 262_000.0, 262_143.3)],
        [EnergyCounter("package-0", 10.0, 262_143.3)],
    )
    assert used_j(before, after) == pytest.approx(153.3)
    assert used_j(after, [EnergyCounter("package-0", 35.5, 262_143.3)]) == pytest.approx(25.5)
    assert used_j(before, []) is None
    assert used_j([], []) is None


def test_without_power_counters_no_power_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.device.probes import power

    monkeypatch.setattr(power, "counters", list)
    with PowerMeter() as meter:
        pass
    assert meter.use is None
    read = iter((100.0, 120.0))
    monkeypatch.setattr(power, "counters", lambda: [EnergyCounter("nvidia-0", next(read), 0.0)])
    with PowerMeter() as meter:
        pass
    assert meter.use is not None
    assert (meter.use.joules, meter.use.source) == (20.0, "nvidia-0")
    assert meter.use.watts == pytest.approx(20.0 / meter.use.seconds)


def test_a_gpus_own_counter_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.device.probes import nvidia

    @contextlib.contextmanager
    def session() -> Iterator[Any]:
        yield SimpleNamespace(
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1500 * (handle + 1),
        )

    monkeypatch.setattr(nvidia, "session", session)
    assert nvidia.energy() == [("nvidia-0", 1.5), ("nvidia-1", 3.0)]


def test_metrics_contain_only_counters_that_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from starlette.testclient import TestClient

    from localllm.device.probes import power
    from localllm.server.app import create_app
    from localllm.server.models.router import ModelRouter
    from support.scripted_engine import ScriptedEngine

    def page_of() -> str:
        app = create_app(ModelRouter({"tiny": ScriptedEngine()}), power=power.power_figures)
        return TestClient(app, base_url="http://127.0.0.1").get("/metrics").text

    monkeypatch.setattr(power, "counters", lambda: rapl({"intel-rapl:0": PACKAGE}))
    page = page_of()
    assert (
        "# TYPE localllm_energy_package_0_0_joules_total "
        "counter\nlocalllm_energy_package_0_0_joules_total 53012.346\n" in page
    )
    monkeypatch.setattr(power, "counters", list)
    assert "joules" not in page_of()


def test_bench_prints_power_if_it_is_known() -> None:
    figures = {
        "decode_tok_s": 20.0,
        "short_tok_s": 21.0,
        "prefill_tok_s": 100.0,
        "prompt_tokens": 512,
        "memory_bytes": 10**9,
    }
    assert not any("power" in line for line in lines(figures))
    power = {"watts": 40.0, "joules_per_token": 2.0, "source": "RAPL: package-0"}
    assert any(
        "40.0 W" in line and "2.00 J a token" in line for line in lines({**figures, "power": power})
    )
