"""Recorded outputs of real machines are identified as the right machine, with correct memory and
bandwidth."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from device import recordings
from localllm.device.machines import identify
from localllm.device.types import DeviceUnreadableError, Figure, Readings

GIB = 1 << 30
KIB = 1 << 10


@dataclass(frozen=True)
class Expected:
    kind: str
    accelerator: str
    match: str
    limit_gib: float
    bandwidth_gbps: float
    basis: str = "datasheet"


# The reserve for the system in shared memory is written out: the limit is 0.95 × the kernel's
# MemTotal, half a GiB less below 10 GiB, and an eighth less below 4. For a carve-out, ROCm has the
# carve-out or the GTT, not the sum of both.
EXPECTED = {
    "container_v1_128mb": Expected("system", "cpu", "", 0.875 / 8, 51.2, "assumed"),
    "container_v1_nested": Expected("system", "cpu", "", 4 - 0.5, 51.2, "assumed"),
    "container_v2_125mb": Expected("system", "cpu", "", 0.875 * 131072000 / GIB, 51.2, "assumed"),
    "cpu_only_ddr4_one_stick": Expected(
        "system", "cpu", "", 0.95 * 16384000 * KIB / GIB, 24.0, "derived"
    ),
    "cpu_only_vm": Expected("system", "cpu", "", 0.95 * 24684084 * KIB / GIB, 51.2, "assumed"),
    "gb10_not_supported": Expected(
        "unified", "cuda", "DGX Spark Founders Edition (GB10)", 115.6, 273
    ),
    "gb10_nvml_success": Expected(
        "unified", "cuda", "DGX Spark Founders Edition (GB10)", 113.7, 273
    ),
    "gb10_table": Expected("unified", "cuda", "DGX Spark Founders Edition (GB10)", 115.6, 273),
    "jetson_agx_orin_64gb": Expected(
        "unified", "cuda", "Jetson AGX Orin 64GB", 0.95 * 62840 / 1024, 204.8
    ),
    "jetson_orin_nano": Expected(
        "unified", "cuda", "Jetson Orin Nano 8GB (15W)", 7.44 - 0.5, 68.22
    ),
    "jetson_orin_nx_16gb": Expected("unified", "cuda", "Jetson Orin NX 16GB", 0.95 * 15.3, 102.4),
    "laptops_truncated_names": Expected("discrete", "cuda", "", 16, 192.3, "assumed"),
    "mac_m1_pro_16gb": Expected("unified", "metal", "M1 Pro (14-core GPU)", 16 * 2 / 3, 200),
    "mac_m2_max_96gb": Expected("unified", "metal", "M2 Max (38-core GPU)", 73728e6 / GIB, 400),
    "mac_m3_16gb": Expected("unified", "metal", "M3 (8-core GPU)", 11.84, 100),
    "mac_m4_max_64gb": Expected("unified", "metal", "M4 Max (40-core GPU)", 48, 546),
    "mac_m5_max_128gb_raised": Expected("unified", "metal", "M5 Max (40-core GPU)", 112, 614),
    "mac_m5_max_128gb_stock": Expected("unified", "metal", "M5 Max (40-core GPU)", 107.52, 614),
    "rtx_4070_desktop": Expected("discrete", "cuda", "GeForce RTX 4070", 12282 / 1024, 504.2),
    "rtx_4070_laptop_log": Expected("discrete", "cuda", "GeForce RTX 4070 Laptop", 8, 256),
    "rtx_4090_two": Expected("discrete", "cuda", "GeForce RTX 4090", 2 * 24564 / 1024, 1008),
    "rtx_5090_devicequery": Expected(
        "discrete", "cuda", "GeForce RTX 5090", 33677180928 / GIB, 1792
    ),
    "rtx_5090_two": Expected("discrete", "cuda", "GeForce RTX 5090", 2 * 32607 / 1024, 1792),
    "rx_7900_xt": Expected("discrete", "rocm", "Radeon RX 7900 XT", 21458059264 / GIB, 800),
    "rx_7900_xtx": Expected("discrete", "rocm", "Radeon RX 7900 XTX", 24560 / 1024, 960),
    "strix_halo_96gb_carveout": Expected(
        "unified", "rocm", "Ryzen AI Max+ 395 (Strix Halo)", 96, 256
    ),
    "strix_halo_default": Expected(
        "unified", "rocm", "Ryzen AI Max+ 395 (Strix Halo)", 63968 / 1024, 256
    ),
    "strix_halo_raised": Expected("unified", "rocm", "Ryzen AI Max+ 395 (Strix Halo)", 96, 256),
    "wsl2_gtx1650_laptop": Expected("discrete", "cuda", "", 4, 112, "assumed"),
}


@pytest.mark.parametrize("name", recordings.names())
def test_a_recorded_machine_is_recognised(name: str) -> None:
    expected = EXPECTED[name]
    device = identify(recordings.load(name))
    assert (device.kind, device.accelerator, device.match) == (
        expected.kind,
        expected.accelerator,
        expected.match,
    )
    assert device.memory.limit_bytes / GIB == pytest.approx(expected.limit_gib, rel=2e-3)
    assert device.bandwidth_gbps.value == pytest.approx(expected.bandwidth_gbps)
    assert device.bandwidth_gbps.basis == expected.basis
    assert device.bandwidth_gbps.source


@pytest.mark.parametrize("name", recordings.names())
def test_memory_values_are_ordered_and_every_recording_states_its_origin(name: str) -> None:
    device = identify(recordings.load(name))
    for memory in (device.memory, device.host):
        if memory is not None:
            assert 0 <= memory.available_bytes <= memory.limit_bytes <= memory.total_bytes
    assert recordings.header(name)["source"].startswith(("https://", "read for this test"))
    assert recordings.header(name)["machine"]


def test_every_recording_has_expected_values() -> None:
    assert set(recordings.names()) == set(EXPECTED)


def test_gb10_counts_reclaimable_page_cache_and_keeps_five_per_cent_free() -> None:
    memory = identify(recordings.load("gb10_not_supported")).memory
    total, available = 127600748 * KIB, 118566368 * KIB
    assert memory.total_bytes == total
    assert memory.total_bytes - memory.limit_bytes == pytest.approx(0.05 * total, rel=1e-6)
    assert memory.available_bytes == pytest.approx(available - 0.05 * total, rel=1e-6)


def test_gb10_memory_is_not_counted_twice_if_nvml_reports_it() -> None:
    device = identify(recordings.load("gb10_nvml_success"))
    assert device.host is None
    assert device.memory.total_bytes < 128 * GIB
    assert device.memory.available_bytes > 100 * GIB  # NVML's own "free" is 7.4 GiB


def test_a_32_gb_card_with_32_gb_of_ram_is_not_unified_memory() -> None:
    device = identify(recordings.load("rtx_5090_devicequery"))
    assert device.kind == "discrete"
    assert device.host is not None
    assert device.memory.total_bytes == 33677180928
    assert device.compute_capability == "12.0"


def test_vram_used_by_other_programs_is_not_available() -> None:
    device = identify(recordings.load("rtx_5090_two"))
    free_mib = 2 * 32607 - 29324 - 30357
    assert device.memory.available_bytes == free_mib << 20
    assert device.n_gpus == 2


def test_a_small_gtt_limit_is_reported_with_the_kernel_setting_and_a_raised_one_is_not() -> None:
    advice = [
        f.fix
        for f in identify(recordings.load("strix_halo_default")).findings
        if "GTT" in f.message
    ]
    assert len(advice) == 1
    # 124 GiB: the documented maximum for a 128 GB machine
    assert "ttm.pages_limit=32505856" in advice[0]
    assert not [
        f for f in identify(recordings.load("strix_halo_raised")).findings if "GTT" in f.message
    ]


def test_a_carve_out_is_only_a_part_of_the_gpus_memory() -> None:
    memory = identify(recordings.load("strix_halo_default")).memory
    assert memory.limit_bytes > 60 * GIB  # not the 512 MB that rocm-smi shows


def test_on_wsl_the_visible_memory_and_the_setting_for_it_are_reported() -> None:
    device = identify(recordings.load("wsl2_gtx1650_laptop"))
    assert device.os == "Linux (WSL2)"
    assert any(".wslconfig" in finding.fix for finding in device.findings)


def test_a_containers_memory_limit_is_reported() -> None:
    device = identify(recordings.load("container_v1_nested"))
    assert any("container" in finding.message for finding in device.findings)
    assert device.memory.total_bytes == 4294967296


@pytest.mark.parametrize("active", [0, 4 * GIB, 6 * GIB])
def test_page_cache_in_a_container_counts_as_free(active: int) -> None:
    stat = f"anon 1073741824\ninactive_file {6 * GIB - active}\nactive_file {active}\n"
    files = {
        "/proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n",
        "/proc/self/cgroup": "0::/docker/abc",
        "/sys/fs/cgroup/docker/abc/memory.max": "8589934592",
        "/sys/fs/cgroup/docker/abc/memory.current": "7516192768",
        "/sys/fs/cgroup/docker/abc/memory.stat": stat,
    }
    memory = identify(Readings("linux", "x86_64", files)).memory
    assert memory.available_bytes == pytest.approx(8 * GIB - GIB - 0.5 * GIB, rel=1e-3)


def test_a_parent_groups_tighter_limit_binds() -> None:
    files = {
        "/proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n",
        "/proc/self/cgroup": "0::/pod/container",
        "/sys/fs/cgroup/pod/container/memory.max": "max",
        "/sys/fs/cgroup/pod/memory.max": "2147483648",
    }
    assert identify(Readings("linux", "x86_64", files)).memory.total_bytes == 2 * GIB


def test_a_parent_cgroup_used_by_others_leaves_only_its_free_part() -> None:
    files = {
        "/proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n",
        "/proc/self/cgroup": "0::/pod/container",
        "/sys/fs/cgroup/pod/container/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/pod/container/memory.current": str(GIB),
        "/sys/fs/cgroup/pod/memory.max": str(12 * GIB),
        "/sys/fs/cgroup/pod/memory.current": str(10 * GIB),
    }
    memory = identify(Readings("linux", "x86_64", files)).memory
    assert memory.total_bytes == 8 * GIB
    assert memory.available_bytes == pytest.approx(2 * GIB - 0.5 * GIB, rel=1e-3)


def test_orin_nano_super_mode_has_the_bandwidth_of_its_power_mode() -> None:
    slow = recordings.load("jetson_orin_nano")
    fast = replace(slow, files={**slow.files, "/var/lib/nvpmodel/status": "pmode:0002 MAXN_SUPER"})
    assert identify(fast).match == "Jetson Orin Nano Super 8GB"
    assert identify(slow).match == "Jetson Orin Nano 8GB (15W)"


def test_a_wired_limit_above_physical_memory_is_clamped_and_reported() -> None:
    sysctl = (
        "machdep.cpu.brand_string: Apple M2\nhw.memsize: 17179869184\niogpu.wired_limit_mb: 20000\n"
    )
    outputs = {"sysctl": sysctl, "metal": "recommendedMaxWorkingSetSize = 20971520000 bytes"}
    device = identify(Readings("macos", "arm64", {}, outputs))
    assert device.memory.limit_bytes == 16 * GIB
    assert any("iogpu.wired_limit_mb=0" in finding.fix for finding in device.findings)


def test_an_m4_max_with_32_gpu_cores_is_the_410_gb_s_bin() -> None:
    readings = recordings.load("mac_m4_max_64gb")
    small = replace(readings, outputs={**readings.outputs, "ioreg": '"gpu-core-count" = 32'})
    bandwidth = identify(small).bandwidth_gbps
    assert bandwidth is not None
    assert bandwidth.value == 410


def test_a_mac_in_a_virtual_machine_runs_on_the_cpu_with_its_measured_bandwidth() -> None:
    outputs = {"sysctl": "machdep.cpu.brand_string: Apple processor\nhw.memsize: 8589934592\n"}
    device = identify(Readings("macos", "arm64", {}, outputs), Figure(40.0, "measured", "test"))
    assert (device.kind, device.accelerator) == ("system", "cpu")
    assert device.bandwidth_gbps == Figure(40.0, "measured", "test")


def test_an_nvidia_gpu_without_a_responding_driver_is_an_error_with_a_fix() -> None:
    files = {
        "/proc/meminfo": "MemTotal: 16384000 kB\nMemAvailable: 12000000 kB\n",
        "/sys/class/drm/card0/device/vendor": "0x10de",
    }
    device = identify(Readings("linux", "x86_64", files))
    assert device.accelerator == "cpu"
    assert [f.level for f in device.findings if f.fix and "NVIDIA" in f.message] == ["error"]


def test_reserved_huge_pages_do_not_reduce_a_cpus_available_memory() -> None:
    files = {
        "/proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 20000000 kB\n"
        "HugePages_Total: 1024\nHugePages_Free: 0\nHugepagesize: 2048 kB\n"
    }
    memory = identify(Readings("linux", "x86_64", files)).memory
    assert memory.available_bytes == pytest.approx(20000000 * KIB - 0.05 * 32 * GIB, rel=1e-6)


def test_an_integrated_cuda_gpu_can_use_only_huge_pages_if_they_are_reserved() -> None:
    meminfo = (
        "MemTotal: 127600748 kB\nMemAvailable: 20000000 kB\n"
        "HugePages_Total: 50000\nHugePages_Free: 40000\nHugepagesize: 2048 kB\n"
    )
    readings = recordings.load("gb10_not_supported")
    device = identify(replace(readings, files={**readings.files, "/proc/meminfo": meminfo}))
    assert device.memory.available_bytes == pytest.approx(
        40000 * 2048 * KIB - 0.05 * 127600748 * KIB, rel=1e-6
    )


def test_different_cards_read_their_shares_of_weights_in_turn() -> None:
    nvml = (
        '[{"name": "NVIDIA GeForce RTX 4090", "total": 25757220864, "used": 0},'
        ' {"name": "NVIDIA GeForce RTX 3090", "total": 25769803776, "used": 0}]'
    )
    files = {"/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n"}
    bandwidth = identify(Readings("linux", "x86_64", files, {"nvml": nvml})).bandwidth_gbps
    assert bandwidth is not None
    assert bandwidth.value == pytest.approx(2 / (1 / 1008 + 1 / 936.2), rel=1e-3)
    assert bandwidth.basis == "derived"


def test_an_unknown_card_gets_its_bandwidth_from_clock_times_width() -> None:
    nvml = (
        '[{"name": "NVIDIA GeForce GTX 1650", "total": 4294967296, "bus_bits": 128, '
        '"max_memory_mhz": 6001}]'
    )
    files = {"/proc/meminfo": "MemTotal: 16384000 kB\nMemAvailable: 12000000 kB\n"}
    bandwidth = identify(Readings("linux", "x86_64", files, {"nvml": nvml})).bandwidth_gbps
    assert bandwidth is not None
    assert (bandwidth.value, bandwidth.basis) == (pytest.approx(192.0, abs=0.1), "derived")


def test_clocks_that_contradict_the_table_win_and_are_reported() -> None:
    nvml = (
        '[{"name": "NVIDIA GeForce RTX 4070", "total": 12878610432, "bus_bits": 192, '
        '"max_memory_mhz": 7000}]'
    )
    files = {"/proc/meminfo": "MemTotal: 16384000 kB\nMemAvailable: 12000000 kB\n"}
    device = identify(Readings("linux", "x86_64", files, {"nvml": nvml}))
    assert device.bandwidth_gbps is not None
    assert device.bandwidth_gbps.value == pytest.approx(336)
    assert any("clocks" in finding.message for finding in device.findings)


def test_on_windows_vram_is_from_the_registry_and_not_from_adapter_ram() -> None:
    display = (
        "\nHKEY_LOCAL_MACHINE\\SYSTEM\\CurrentControlSet\\Control\\Class\\{4d36e968-e325-11ce-bfc1-08002be10318}\\0000\n"
        "    DriverDesc    REG_SZ    AMD Radeon RX 9070 XT\n"
        "    HardwareInformation.qwMemorySize    REG_QWORD    0x3fc000000\n"
        "    MatchingDeviceId    REG_SZ    PCI\\VEN_1002&DEV_7550&REV_C0\n"
    )
    outputs = {
        "memory-status": "ullTotalPhys: 34282143744\nullAvailPhys: 25000000000\n",
        "display-class": display,
        "processor": "    ProcessorNameString    REG_SZ    AMD Ryzen 7 5700X 8-Core Processor\n",
    }
    device = identify(Readings("windows", "AMD64", {}, outputs))
    assert (device.kind, device.match) == ("discrete", "Radeon RX 9070 XT")
    assert device.memory.total_bytes == 0x3FC000000
    assert device.host is not None


def test_windows_apu_adds_carve_out_and_half_of_the_rest() -> None:
    display = (
        "\nHKEY_LOCAL_MACHINE\\SYSTEM\\CurrentControlSet\\Control\\Class\\{4d36e968-e325-11ce-bfc1-08002be10318}\\0000\n"
        "    DriverDesc    REG_SZ    AMD Radeon(TM) 8060S Graphics\n"
        "    HardwareInformation.qwMemorySize    REG_QWORD    0x1000000000\n"
    )
    outputs = {
        "memory-status": f"ullTotalPhys: {63 * GIB}\nullAvailPhys: {50 * GIB}\n",
        "display-class": display,
        "processor": "    ProcessorNameString    REG_SZ    AMD RYZEN AI MAX+ 395 w/ Radeon 8060S\n",
    }
    device = identify(Readings("windows", "AMD64", {}, outputs))
    assert device.match == "Ryzen AI Max+ 395 (Strix Halo)"
    assert device.memory.limit_bytes == 64 * GIB + 63 * GIB // 2


@pytest.mark.parametrize("system", ["linux", "macos", "windows"])
def test_a_system_without_any_readings_is_a_typed_error(system: str) -> None:
    assert system in ("linux", "macos", "windows")
    with pytest.raises(DeviceUnreadableError) as caught:
        identify(Readings(system))  # type: ignore[arg-type]
    assert caught.value.hint
