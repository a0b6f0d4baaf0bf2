"""The memory that Metal recommends: which of its functions are called, in which order. Fake
libraries record the calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from localllm.device.machines import identify
from localllm.device.probes.systems import metal
from localllm.device.types import Readings

GIB = 1 << 30
LISTED, DEFAULT, NTH = 7, 8, 9  # "pointers"


class Function:
    """A foreign function that records the types set by ctypes and returns a fixed answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self._answer(*arguments)


@dataclass
class Mac:
    """The `load` function of its libraries. Metal has a default device only after CoreGraphics is
    loaded, and `n_devices` in its list."""

    default: bool = True
    n_devices: int = 1
    size: int = 17 * GIB
    calls: list[str] = field(default_factory=list)

    def load(self, path: str) -> Any:
        name = path.rpartition("/")[2]
        self.calls.append(name)
        return {"libobjc.A.dylib": self._objc(), "Metal": self._metal()}.get(name, object())

    def _objc(self) -> Any:
        def sent(receiver: int, message: bytes, *_: int) -> int:
            self.calls.append(f"{receiver} {message.decode()}")
            return {
                (LISTED, b"count"): self.n_devices,
                (LISTED, b"objectAtIndex:"): NTH,
                (DEFAULT, b"recommendedMaxWorkingSetSize"): self.size,
                (NTH, b"recommendedMaxWorkingSetSize"): self.size,
            }[receiver, message]

        library: Any = type("objc", (), {})()
        library.sel_registerName, library.objc_msgSend = Function(lambda name: name), Function(sent)
        return library

    def _metal(self) -> Any:
        def default() -> int | None:
            self.calls.append("default")
            return DEFAULT if self.default and "CoreGraphics" in self.calls else None

        def every() -> int | None:
            self.calls.append("all")
            return LISTED if self.n_devices >= 0 else None

        library: Any = type("metal", (), {})()
        library.MTLCreateSystemDefaultDevice, library.MTLCopyAllDevices = (
            Function(default),
            Function(every),
        )
        return library


def test_core_graphics_is_loaded_before_the_default_metal_device_is_queried() -> None:
    mac = Mac()
    assert metal(mac.load) == f"recommendedMaxWorkingSetSize = {17 * GIB} bytes"
    assert mac.calls.index("CoreGraphics") < mac.calls.index("default")
    assert "all" not in mac.calls


def test_without_a_default_device_the_first_metal_device_is_used() -> None:
    mac = Mac(default=False)
    assert metal(mac.load) == f"recommendedMaxWorkingSetSize = {17 * GIB} bytes"
    assert mac.calls.index("default") < mac.calls.index("all")
    assert mac.calls[-1] == f"{NTH} recommendedMaxWorkingSetSize"


@pytest.mark.parametrize("mac", [Mac(False, 0), Mac(False, -1), Mac(size=0), Mac(False, size=0)])
def test_without_a_metal_device_the_working_set_limit_depends_on_memory_size(mac: Mac) -> None:
    assert metal(mac.load) == ""
    sysctl = f"machdep.cpu.brand_string: Apple M4\nhw.memsize: {32 * GIB}\n"
    ioreg = '"gpu-core-count" = 10'
    without = identify(Readings("macos", "arm64", {}, {"sysctl": sysctl, "ioreg": ioreg})).memory
    asked = {"sysctl": sysctl, "ioreg": ioreg, "metal": metal(Mac(size=20 * GIB).load)}
    told = identify(Readings("macos", "arm64", {}, asked)).memory
    assert (without.basis, told.basis) == ("assumed", "reported")
    assert told.limit_bytes == 20 * GIB
    assert 20 * GIB < without.limit_bytes < 28 * GIB


@pytest.mark.parametrize("missing", ["CoreGraphics", "libobjc.A.dylib", "Metal"])
def test_a_missing_library_gives_no_metal_readings(missing: str) -> None:
    def load(path: str) -> Any:
        if path.endswith(missing):
            raise OSError(missing)
        return Mac().load(path)

    assert metal(load) == ""
