"""The findings of `doctor`, each with its exact fix, or "not checked" for facts that can't be
read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from device import recordings
from localllm.cli.commands import device as device_command
from localllm.cli.commands import doctor as doctor_command
from localllm.device.ggml import GgmlBuild
from localllm.device.health import BuildFacts, HealthCheck, HealthFacts, health_checks
from localllm.device.machines import identify
from localllm.device.name_lookup import resolve
from localllm.device.probes import health
from localllm.device.types import device_to_json
from localllm.errors import UsageError

CPU_BUILD = BuildFacts(
    "llama-cpp-python 0.3.36", ("libggml-base.so", "libggml-cpu.so", "libllama.so")
)
CUDA_LIBRARIES = ("libggml-base.so", "libggml-cpu.so", "libggml-cuda.so", "libllama.so")


def named(checks: list[HealthCheck], name: str) -> list[HealthCheck]:
    return [check for check in checks if check.name == name]


def test_without_readings_only_device_and_memory_can_be_ok() -> None:
    checks = health_checks(identify(recordings.load("cpu_only_ddr4_one_stick")), HealthFacts())
    assert {check.name for check in checks if check.status == "ok"} <= {"device", "memory"}
    assert {"swap", "memory pressure", "power", "disk", "file limit"} <= {
        check.name for check in checks if check.status == "not checked"
    }
    said = doctor_command.lines(checks)
    assert "healthy" not in "\n".join(said).lower()
    assert "not checked" in said[-1]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_narrow_terminal_breaks_lines_between_words(columns: int) -> None:
    checks = health_checks(identify(recordings.load("cpu_only_ddr4_one_stick")), HealthFacts())
    said = doctor_command.lines(checks, columns)
    assert max(map(len, said)) <= columns
    assert " ".join(said).split() == " ".join(doctor_command.lines(checks)).split()


def test_a_cpu_build_on_a_cuda_machine_is_an_error_with_the_command_that_rebuilds_it() -> None:
    device = identify(recordings.load("rtx_4070_desktop"))
    (check,) = named(health_checks(device, HealthFacts(build=CPU_BUILD)), "llama.cpp build")
    assert check.status == "error"
    assert check.fix == "localllm setup"


@pytest.mark.parametrize(
    ("architectures", "recording", "status"),
    [
        ((50, 75, 80, 86, 89), "rtx_5090_devicequery", "error"),
        ((50, 75, 80, 86, 89, 120), "rtx_5090_devicequery", "ok"),
        ((120,), "gb10_nvml_success", "ok"),  # 12.0 code runs on 12.1
        ((121,), "rtx_5090_devicequery", "error"),  # 12.1 code does not run on 12.0
        ((100,), "gb10_nvml_success", "error"),  # 10.0 is another family
        ((), "rtx_5090_devicequery", "not checked"),
    ],
)
def test_cuda_code_must_be_of_the_gpus_major_version(
    architectures: tuple[int, ...], recording: str, status: str
) -> None:
    device = identify(recordings.load(recording))
    build = BuildFacts("llama-cpp-python 0.3.36", CUDA_LIBRARIES, architectures)
    (check,) = named(health_checks(device, HealthFacts(build=build)), "llama.cpp build")
    assert check.status == status
    assert status != "error" or check.fix == "localllm setup"


def test_architectures_are_read_out_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = b"\x7fELF\x00750,860,1200\x00 .target sm_90a compute_121 sm_86\x00 12,99\x00"
    (tmp_path / "libggml-cuda.so").write_bytes(code)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    build = health.llama_cpp_build()
    assert build is not None
    assert build.cuda_architectures == (75, 86, 90, 120, 121)


def test_no_llama_cpp_at_all_is_an_error() -> None:
    (check,) = named(
        health_checks(identify(recordings.load("cpu_only_vm")), HealthFacts()), "llama.cpp build"
    )
    assert (check.status, check.fix) == ("error", "pip install llama-cpp-python")


def test_a_vulkan_build_for_an_amd_gpu_causes_no_finding() -> None:
    device = identify(recordings.load("rx_7900_xtx"))
    build = BuildFacts("llama-cpp-python 0.3.36", (*CPU_BUILD.libraries, "libggml-vulkan.so"))
    (check,) = named(health_checks(device, HealthFacts(build=build)), "llama.cpp build")
    assert check.status == "ok"


def test_the_devices_own_warnings_appear_with_their_fix() -> None:
    checks = health_checks(
        identify(recordings.load("strix_halo_default")), HealthFacts(build=CPU_BUILD)
    )
    assert any("ttm.pages_limit=" in check.fix for check in checks)
    assert not named(checks, "GTT limit")
    raised = health_checks(
        identify(recordings.load("strix_halo_raised")), HealthFacts(build=CPU_BUILD)
    )
    assert [check.status for check in named(raised, "GTT limit")] == ["ok"]


@pytest.mark.parametrize(
    ("facts", "name", "status"),
    [
        (HealthFacts(swap=(8 << 30, 6 << 30)), "swap", "warning"),
        (HealthFacts(swap=(8 << 30, 0)), "swap", "ok"),
        (HealthFacts(swap=(0, 0)), "swap", "ok"),
        (
            HealthFacts(pressure="some avg10=22.00 avg60=1.0 total=1\n"),
            "memory pressure",
            "warning",
        ),
        (HealthFacts(pressure="some avg10=0.00 avg60=0.0 total=1\n"), "memory pressure", "ok"),
        (HealthFacts(platform_profile="low-power\n"), "power", "warning"),
        (HealthFacts(platform_profile="balanced\n"), "power", "ok"),
        (HealthFacts(on_battery=True), "power", "warning"),
        (HealthFacts(disk_free_bytes={"models": 3 << 30}), "disk", "warning"),
        (HealthFacts(disk_free_bytes={"models": 300 << 30}), "disk", "ok"),
        (HealthFacts(open_files=256), "file limit", "warning"),
        (HealthFacts(open_files=1 << 20), "file limit", "ok"),
        (HealthFacts(open_files=-1), "file limit", "ok"),
    ],
)
def test_each_check_warns_exactly_under_its_condition(
    facts: HealthFacts, name: str, status: str
) -> None:
    (check,) = named(health_checks(identify(recordings.load("cpu_only_vm")), facts), name)
    assert check.status == status
    assert status != "warning" or check.fix


def test_macos_low_power_mode_and_wired_limit_are_judged() -> None:
    mac = identify(recordings.load("mac_m5_max_128gb_stock"))
    slow = health_checks(mac, HealthFacts(pmset="Battery Power:\n lowpowermode         1\n"))
    assert [check.status for check in named(slow, "power")] == ["warning"]
    (limit,) = named(slow, "wired limit")
    assert limit.status == "ok"
    assert "iogpu.wired_limit_mb=" in limit.message
    blind = health_checks(identify(recordings.load("mac_m4_max_64gb")), HealthFacts())
    assert [check.status for check in named(blind, "wired limit")] == ["not checked"]


def test_this_installation_is_checked_without_loading_the_engine(tmp_path: object) -> None:
    program = (
        "import sys; from pathlib import Path; from localllm.device.probes import health; "
        "facts = health.read(Path('.'), Path('.')); "
        "print('llama_cpp' in sys.modules, bool(facts.disk_free_bytes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False True"


def test_the_installed_build_is_found_by_its_files() -> None:
    build = health.llama_cpp_build()
    if build is None:
        pytest.skip("llama-cpp-python is not installed")
    assert build.title.startswith("llama-cpp-python 0.")
    assert any("llama" in library for library in build.libraries)


def test_libraries_in_place_of_the_wheels_are_checked_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libllama.so.1.0.0", "libggml-cuda.so", "libggml-base.so"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    build = health.llama_cpp_build()
    assert build is not None
    assert build.title == f"llama.cpp 1.0.0 in {tmp_path}"
    assert build.accelerators == ("cuda",)
    device = identify(recordings.load("cpu_only_vm"))
    lacking = GgmlBuild(version="llama 1.0.0", lacks={"mtp": "no function"})
    checks = health_checks(device, HealthFacts(build=build, llama_cpp=lacking))
    (drafting,) = named(checks, "llama.cpp MTP drafting")
    assert "unset LLAMA_CPP_LIB_PATH" in drafting.fix
    assert lacking.title == "llama.cpp 1.0.0"


def test_json_is_the_published_shape_and_every_figure_has_its_basis() -> None:
    body = json.loads(json.dumps(device_to_json(resolve("rtx 5090"))))
    assert body["simulated"] is True
    assert isinstance(body["memory"]["limit_bytes"], int)
    assert body["bandwidth_gbps"] == {
        "value": 1792.0,
        "basis": "datasheet",
        "source": "https://www.techpowerup.com/gpu-specs/geforce-rtx-5090.c4216",
    }
    for key in ("fp16_tflops", "fp8_tflops", "fp4_tflops"):
        assert body[key]["basis"] in ("datasheet", "derived")
    assert body["host_memory"] is None


@pytest.mark.parametrize("name", recordings.names())
def test_every_recorded_machine_prints_as_a_table(name: str) -> None:
    device = identify(recordings.load(name))
    text = "\n".join(device_command.lines(device))
    assert device.name in text
    assert all(finding.message in text for finding in device.findings)


def test_the_command_prints_json_of_a_named_machine(capsys: pytest.CaptureFixture[str]) -> None:
    device_command.device(name="M4 Max 128GB", as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["match"] == "M4 Max (40-core GPU)"
    assert printed.err == ""


def test_measuring_another_machine_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        device_command.device(name="M4 Max", measure=True)


def test_overrides_apply_to_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    device_command.device(memory=8.0, bandwidth=50.0, as_json=True)
    body = json.loads(capsys.readouterr().out)
    assert body["memory"]["total_bytes"] == 8 << 30
    assert (
        body["memory"]["limit_bytes"]
        == body["memory"]["total_bytes"] - body["memory"]["system_bytes"]
        < 8 << 30
    )
    assert body["bandwidth_gbps"]["basis"] == "given"


def test_doctor_runs_here_and_its_json_lists_every_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    doctor_command.doctor(as_json=True)
    body = json.loads(capsys.readouterr().out)
    assert body["device"]["name"]
    assert {check["status"] for check in body["checks"]} <= {
        "ok",
        "warning",
        "error",
        "not checked",
    }


def test_an_assumed_bandwidth_is_a_finding_of_doctor() -> None:
    first = health_checks(identify(recordings.load("cpu_only_vm")), HealthFacts())[0]
    assert (first.status, first.fix) == ("warning", "localllm device --measure")


@pytest.mark.parametrize(
    "name", ["RTX 4090 + 64GB RAM", "2x RTX 3090 + 64GB RAM", "M4 Max 128GB", "DGX Spark"]
)
def test_doctor_and_device_print_the_account_of_each_memory(name: str) -> None:
    device = resolve(name)
    memories = [card.memory for card in device.cards] or [device.memory]
    memories += [device.host] if device.host is not None and device.kind == "discrete" else []
    checked, shown = health_checks(device, HealthFacts())[0].message, device_command.lines(device)
    assert len(device.accounts) == len(memories)
    for memory, line in zip(memories, device.accounts, strict=True):
        assert line.endswith(memory.account())
        assert line in checked
        assert f"  · {line}" in shown
