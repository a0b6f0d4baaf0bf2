"""Detection of this machine: probes are fast and import no heavy package. The bandwidth is measured
once and stored with its date."""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.device import backend_view, bandwidth, measurement_store
from localllm.device.detect import detect, from_readings, measures_ram, with_matrix_rates
from localllm.device.machines import identify
from localllm.device.measurement_store import Measurement
from localllm.device.name_lookup import resolve
from localllm.device.parsers import gpus as parsers
from localllm.device.probes import matrix_rate
from localllm.device.probes import nvidia as probes
from localllm.device.probes.systems import read
from support.native_library import compile_library, include_folder

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.long
def test_probing_this_machine_takes_under_300_ms() -> None:
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        detect()
        taken.append(time.perf_counter() - started)
    assert statistics.median(taken) < 0.3


def test_detecting_imports_nothing_heavy() -> None:
    program = (
        "import sys; from localllm.device.detect import detect; detect(); "
        "print(sorted(m for m in ('numpy', 'torch', 'llama_cpp', 'mlx', 'textual', 'starlette') if "
        "m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_this_machine_has_memory_with_a_stated_basis() -> None:
    device = detect()
    assert (
        0 < device.memory.available_bytes <= device.memory.limit_bytes <= device.memory.total_bytes
    )
    assert device.memory.source
    assert not device.simulated


def test_a_measured_bandwidth_is_plausible_and_has_basis_and_date() -> None:
    measured = bandwidth.measure_rates(available_bytes=1 << 30, seconds=0.1)
    assert 0.5 < measured.value < 4000
    assert measured.figure.basis == "measured"
    assert re.search(r"\d{4}-\d{2}-\d{2}", measured.figure.source)


def test_measuring_arrays_exceed_the_cache_but_not_a_twentieth_of_memory() -> None:
    assert bandwidth.array_bytes(0, 32 * MIB) >= 2 * 256 * MIB
    assert bandwidth.array_bytes(0, 1024 * MIB) >= 4 * 1024 * MIB
    assert bandwidth.array_bytes(2048 * MIB, 1024 * MIB) <= 2048 * MIB // 20 + 1


def test_a_measurement_is_stored_and_used_until_the_machine_changes(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_store, "BUSY_SHARE", math.inf)
    readings = read()
    first = identify(readings)
    if not measures_ram(first):
        pytest.skip("on this machine the table's bandwidth stands and nothing is measured")
    device = from_readings(readings, measure=True)
    figure = device.host_bandwidth_gbps if device.kind == "discrete" else device.bandwidth_gbps
    assert figure is not None
    later = detect()
    assert (
        later.host_bandwidth_gbps if later.kind == "discrete" else later.bandwidth_gbps
    ) == figure
    assert figure.basis == "measured"
    assert (own_cache / "bandwidth.json").exists()


def test_kernel_speeds_of_a_processor_are_measured_once_per_build(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if detect().accelerator != "cpu":
        pytest.skip("on this machine the processor computes nothing")
    monkeypatch.setattr(measurement_store, "BUSY_SHARE", math.inf)
    assert detect().matrix_rates == ()
    asked: list[str] = []
    time_them = matrix_rate.measure

    def measure(types: Sequence[str]) -> matrix_rate.Measurements | None:
        asked.extend(types)
        return time_them(types[:2])  # half a second each

    monkeypatch.setattr(matrix_rate, "measure", measure)
    first = detect(measure=True)
    assert asked == list(matrix_rate.TYPES)
    assert [rates.type for rates in first.matrix_rates] == asked[:2]
    for rates in first.matrix_rates:
        for figure in (
            rates.stored.prompt_tflops,
            rates.stored.experts_tflops,
            rates.usual.token_tflops,
        ):
            assert figure.basis == "measured"
            assert re.search(rf"{rates.type} .*\d{{4}}-\d{{2}}-\d{{2}}", figure.source)
    assert detect().matrix_rates == first.matrix_rates
    monkeypatch.setattr(backend_view, "build_identity", lambda: "another build")
    assert detect().matrix_rates == ()


def test_only_types_without_a_timing_are_timed(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if detect().accelerator != "cpu":
        pytest.skip("on this machine the processor computes nothing")
    asked: list[list[str]] = []
    others = [0.0]

    def measure(types: Sequence[str]) -> matrix_rate.Measurements:
        asked.append(list(types))
        kinds = ("prompt_flops_s", "experts_flops_s", "token_flops_s")
        figure = Measurement(0.1, "any", "2026-11-25", others[0])
        return {(name, "stored", kind): figure for name in types for kind in kinds}

    monkeypatch.setattr(matrix_rate, "measure", measure)
    for types in (["Q4_K", "Q8_0"], ["Q4_K", "Q6_K"], ["Q6_K"]):
        found = with_matrix_rates(detect(), measure=True, types=types)
    assert asked == [["Q4_K", "Q8_0"], ["Q6_K"]]
    assert [(rates.type, rates.laid_out) for rates in found.matrix_rates] == [
        (t, None) for t in ("Q4_K", "Q8_0", "Q6_K")
    ]
    # Plans do not use a figure that was measured on a busy machine. It is measured again until it
    # settles.
    others[0] = 0.6
    busy = [with_matrix_rates(detect(), measure=True, types=["Q5_K"]) for _ in range(6)]
    assert [len(device.matrix_rates) for device in busy] == [3, 3, 3, 3, 4, 4]
    assert asked[2:] == [["Q5_K"]] * 5


def test_a_build_that_crashes_in_a_timing_causes_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for another processor ends with an illegal instruction as soon as it is used."""
    (tmp_path / "llama_cpp" / "lib").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    shutil.copytree(include_folder(), tmp_path / "include")
    compile_library(
        """
        #include <stdlib.h>
        __attribute__((constructor)) static void start(void) { abort(); }
        """,
        tmp_path / "llama_cpp" / "lib" / "libllama.so",
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    assert matrix_rate.measure(["Q4_K"]) is None


def test_without_measuring_no_file_is_written(own_cache: Path) -> None:
    detect()
    assert not own_cache.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "not json", '{"m": {"value": "x"}}', '{"m": {"value": -1, "source": ""}}']
)
def test_a_damaged_measurement_file_is_ignored_and_replaced(own_cache: Path, content: str) -> None:
    own_cache.mkdir()
    (own_cache / "bandwidth.json").write_text(content, encoding="utf-8")
    assert bandwidth.FIGURES.cached(own_cache, "m") is None
    bandwidth.FIGURES.keep(own_cache, "m", _taken(42.0))
    assert bandwidth.FIGURES.cached(own_cache, "m") == _taken(42.0).figure


def test_a_measurement_is_shown_even_if_it_cannot_be_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example with a full disk, or a home folder that is mounted read-only."""
    own_cache.touch()  # a file where the folder should be
    monkeypatch.setattr(bandwidth, "measure_rates", lambda **_: _taken(33.0))
    device = from_readings(read(), measure=True, remeasure=True)
    if not measures_ram(device):
        return  # it takes bandwidth from a table
    figure = device.host_bandwidth_gbps if device.kind == "discrete" else device.bandwidth_gbps
    assert figure is not None
    assert (figure.value, figure.basis) == (33.0, "measured")


def _taken(gbps: float, others: float = 0.0) -> Measurement:
    return Measurement(gbps, "arrays of 512 MiB", "2026-11-23", others)


def test_a_measurement_records_how_busy_the_machine_was() -> None:
    spin = "print('on', flush=True)\nwhile True: pass"
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            other = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
            )
            stack.callback(other.kill)
            assert other.stdout is not None
            assert other.stdout.readline() == b"on\n"
        measured = bandwidth.measure_rates(available_bytes=1 << 30, seconds=0.5)
    assert measured.busy
    assert "while other programs used" in measured.figure.source


def test_a_measurement_on_a_busy_machine_is_replaced_by_a_later_one(
    own_cache: Path,
) -> None:
    assert bandwidth.FIGURES.due(own_cache, "m")
    bandwidth.FIGURES.keep(own_cache, "m", _taken(7.0, others=0.6))
    assert bandwidth.FIGURES.due(own_cache, "m")
    # Memory can't be faster than its limit, so a lower figure is ignored, busy or not.
    assert bandwidth.FIGURES.keep(own_cache, "m", _taken(5.0, others=0.9)).value == 7.0
    assert bandwidth.FIGURES.keep(own_cache, "m", _taken(20.0)).value == 20.0
    assert not bandwidth.FIGURES.due(own_cache, "m")
    assert bandwidth.FIGURES.cached(own_cache, "m") == _taken(20.0).figure


def test_a_machine_that_is_always_busy_is_not_measured_forever(own_cache: Path) -> None:
    tried = 0
    while bandwidth.FIGURES.due(own_cache, "m"):
        bandwidth.FIGURES.keep(own_cache, "m", _taken(7.0 + tried, others=0.6))
        tried += 1
        assert tried < 20
    assert tried == 5
    figure = bandwidth.FIGURES.cached(own_cache, "m")
    assert figure is not None
    assert figure.value == 11.0


@given(st.lists(st.floats(1.0, 200.0), max_size=4), st.floats(1.0, 200.0))
def test_plans_do_not_rely_on_a_measurement_from_a_busy_machine(
    tmp_path_factory: pytest.TempPathFactory, busy: list[float], quiet: float
) -> None:
    """No figure counts as reliable until it was measured on a quiet machine, or on a busy one so
    often that no quiet moment can be expected."""
    folder = tmp_path_factory.mktemp("kept")
    for gbps in busy:
        bandwidth.FIGURES.keep(folder, "m", _taken(gbps, others=0.6))
        assert bandwidth.FIGURES.reliable(folder, "m") is None
    bandwidth.FIGURES.keep(folder, "m", _taken(max([quiet, *busy])))
    assert bandwidth.FIGURES.reliable(folder, "m") is not None


def test_a_requested_measurement_replaces_an_earlier_one_from_an_idle_machine(
    own_cache: Path,
) -> None:
    bandwidth.FIGURES.keep(own_cache, "m", _taken(20.0))
    assert bandwidth.FIGURES.keep(own_cache, "m", _taken(18.0)).value == 18.0
    # A measurement on a busy machine does not replace one that was made on a quiet machine.
    assert bandwidth.FIGURES.keep(own_cache, "m", _taken(7.0, others=0.6)).value == 18.0
    assert not bandwidth.FIGURES.due(own_cache, "m")


class FakeNvml:
    """nvidia-ml-py's functions for one GPU. Functions that are not listed raise, as NVML does on
    devices that lack them."""

    class NVMLError(Exception):
        """NVML's own error."""

    nvmlMemory_v2 = 2  # noqa: N815 - nvidia-ml-py's name
    NVML_CLOCK_MEM = 2

    def __init__(self, answers: dict[str, object]) -> None:
        self._answers = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1} | answers

    def __getattr__(self, name: str) -> object:
        def call(*_: object, **__: object) -> object:
            if name == "nvmlDeviceGetHandleByIndex":
                return 0
            if name not in self._answers:
                raise self.NVMLError("NOT_SUPPORTED")
            return self._answers[name]

        return call


def test_the_nvml_probe_handles_every_call_that_gb10_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeNvml(
        {"nvmlDeviceGetName": b"NVIDIA GB10", "nvmlDeviceGetCudaComputeCapability": (12, 1)}
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    (gpu,) = parsers.nvml(probes.nvml())
    assert (gpu.name, gpu.compute_capability, gpu.total_bytes) == ("NVIDIA GB10", "12.1", None)


def test_the_nvml_probe_returns_the_values_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(
        total=25757220864, used=531628032, free=25225592832, reserved=400000000
    )
    answers = {
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMemoryBusWidth": 384,
        "nvmlDeviceGetMaxClockInfo": 10501,
        "nvmlDeviceGetAddressingMode": 1,
    }
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(answers))
    (gpu,) = parsers.nvml(probes.nvml())
    assert gpu.total_bytes == 25757220864
    assert gpu.addressing == "hmm"
    assert gpu.derived_bandwidth_gbps == pytest.approx(1008, abs=0.2)


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml({"nvmlDeviceGetName": "NVIDIA L4", "nvmlDeviceGetCount": 2})

    def handle(index: int) -> int:
        if index == 0:
            raise fake.NVMLError("GPU_IS_LOST")
        return index

    fake.nvmlDeviceGetHandleByIndex = handle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert [gpu.name for gpu in parsers.nvml(probes.nvml())] == ["NVIDIA L4"]


def test_a_cpu_measurement_is_never_used_for_a_faster_gpu() -> None:
    for name in ("M4 Max", "dgx spark", "strix halo"):
        assert not measures_ram(resolve(name))
    assert measures_ram(resolve("rtx 4090"))
