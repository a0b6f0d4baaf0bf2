"""Choose the archive of a llama.cpp release that suits a machine.

These functions do no I/O. They read the answers of GitHub's API about releases. A release vX.Y.Z
has one asset, nightly-tag.txt, with the tag bNNNNN of the release that has the archives (November
2026). GitHub states the sha256 of each asset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localllm.device.types import Device
from localllm.setup import cuda
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, Version, version_of

TAG = re.compile(r"latest|v\d{1,4}(\.\d{1,4}){1,3}|b\d{3,7}")
_TAG_FILE = "nightly-tag.txt"
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
# The archives with CUDA's own libraries have half a gigabyte.
_MAX_BYTES = 4 << 30
_NAME = re.compile(
    r"llama-(?P<tag>[bv][\d.]+)-bin-(?P<system>ubuntu|macos|win)"
    r"(?:-(?P<kind>cpu|cuda|rocm|vulkan|hip-radeon))?(?:-(?P<version>\d+(?:\.\d+)+))?"
    r"-(?P<architecture>x64|arm64)\.(?:tar\.gz|zip)"
)
_SYSTEMS = {"linux": "ubuntu", "macos": "macos", "windows": "win"}
_ARCHITECTURES = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64", "arm64": "arm64"}
# The archives for x64 are compiled on Ubuntu 22.04 (measured in b11149: GLIBC_2.34).
_OLDEST_GLIBC: Version = (2, 34)
_OLDEST_CUDA_13_CARD: Version = (7, 5)
# The first Jetson (Thor) that runs the libraries that servers with ARM processors use.
_FIRST_SERVER_CARD: Version = (11, 0)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file to download: its name, address, size, and published digest (sha256 or git's sha1)."""

    name: str
    url: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Release:
    """A release of llama.cpp. `version` is the vX.Y.Z that led to it, if there was one."""

    tag: str
    assets: tuple[Asset, ...]
    version: str = ""

    @property
    def title(self) -> str:
        if self.version:
            return f"{self.version} ({self.tag})"
        return self.tag

    @property
    def tag_file(self) -> Asset | None:
        """The file that names the release with the archives, if this one has no archive."""
        return next((asset for asset in self.assets if asset.name == _TAG_FILE), None)


class ReleaseSource(Protocol):
    """Access to releases and their files. The methods raise LocalLLMErrors."""

    def find(self, tag: str) -> Release:
        """Return the release with this tag that has archives. "latest" is llama.cpp's newest."""

    def headers(self, tag: str) -> tuple[Asset, ...]:
        """Return the C headers of this tag's source."""

    def download(self, asset: Asset, folder: str) -> str:
        """Fetch a file into `folder`, verify its digest, and return its path."""


@dataclass(frozen=True, slots=True)
class _ArchiveName:
    """The parts of an archive's name."""

    asset: Asset
    system: str
    kind: str
    version: Version | None
    architecture: str


def read(answer: Any, version: str = "") -> Release:
    """Parse the API's answer about one release. Raises SetupError if it is not one.

    Assets without a sha256 are left out, because they could not be verified.
    """
    try:
        tag = str(answer["tag_name"])
        assets = tuple(filter(None, (_asset(row) for row in answer["assets"])))
    except (KeyError, TypeError, ValueError) as e:
        raise SetupError(
            f"the list of llama.cpp's releases can't be read ({type(e).__name__}: {e})",
            hint="a proxy may have answered; try again later",
        ) from e
    if not TAG.fullmatch(tag):
        raise SetupError(f"llama.cpp's release has an unusable tag, {tag[:40]!r}")
    return Release(tag, assets, version)


def _asset(row: Mapping[str, Any]) -> Asset | None:
    digest = _SHA256.fullmatch(str(row.get("digest") or ""))
    name = str(row["name"])
    size_bytes = int(row["size"])
    if digest is None or not 0 < size_bytes <= _MAX_BYTES:
        return None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", name):
        return None
    return Asset(name, str(row["browser_download_url"]), size_bytes, digest[1])


def tag_in(text: str) -> str:
    """Return the tag in nightly-tag.txt. Raises SetupError for any other text."""
    tag = text.strip()
    if not re.fullmatch(r"b\d{3,7}", tag):
        raise SetupError(f"llama.cpp's newest release names no build ({tag[:40]!r})")
    return tag


def choose(release: Release, backend: str, device: Device, host: BuildHost) -> tuple[Asset, ...]:
    """Return the archives of `release` for this backend and machine.

    CUDA's own libraries are a second archive. Raises SetupError with the reason if there is no archive.
    """
    reason = unfit(backend, device, host)
    if reason:
        raise SetupError(reason, hint="`localllm setup` compiles llama.cpp here")
    archive_names = [
        archive_name
        for archive_name in map(_archive_name, release.assets)
        if archive_name is not None
    ]
    system = _SYSTEMS[host.system]
    architecture = _ARCHITECTURES[host.architecture]
    for_system = [
        name for name in archive_names if (name.system, name.architecture) == (system, architecture)
    ]
    of_kind = [name for name in for_system if _is_for_backend(name, backend)]
    if not of_kind:
        kinds_text = ", ".join(sorted({name.kind for name in for_system})) or "nothing"
        raise SetupError(
            f"llama.cpp {release.title} has no archive for {backend} on {host.system} "
            f"{host.architecture} (it has {kinds_text} for this system)",
            hint="`localllm setup` compiles llama.cpp here",
        )
    reasons = [_why_unfit(archive_name, device, host) for archive_name in of_kind]
    fitting = [
        name for name, reason_against in zip(of_kind, reasons, strict=True) if not reason_against
    ]
    if not fitting:
        raise SetupError(
            f"llama.cpp {release.title}: {'; '.join(reasons)}",
            hint="`localllm setup` compiles llama.cpp here",
        )
    best = max(fitting, key=lambda archive_name: archive_name.version or (0, 0))
    if backend != "cuda":
        return (best.asset,)
    return (best.asset, _cuda_libraries(release, best.asset))


def unfit(backend: str, device: Device, host: BuildHost) -> str:
    """Return the reason why no archive of any release runs on this machine, or ""."""
    if host.architecture not in _ARCHITECTURES:
        return f"llama.cpp's releases have no archive for {host.architecture}"
    if host.system == "linux" and host.glibc is not None and host.glibc < _OLDEST_GLIBC:
        own_glibc = cuda.dotted(host.glibc)
        needs = cuda.dotted(_OLDEST_GLIBC)
        return f"llama.cpp's archives need glibc {needs} or newer, and this system has {own_glibc}"
    cards = cuda.capabilities(device)
    if backend == "cuda" and device.family == "Jetson" and cards and cards[0] < _FIRST_SERVER_CARD:
        return "llama.cpp's archives for CUDA have no code for this Jetson"
    if backend == "rocm" and host.system == "linux" and host.rocm is None:
        return "llama.cpp's archive for ROCm needs AMD's libraries, which are not installed"
    return ""


def _archive_name(asset: Asset) -> _ArchiveName | None:
    """Return the parts of an archive's name, or None for other files."""
    match = _NAME.fullmatch(asset.name)
    if match is None:
        return None
    kind = match["kind"] or "cpu"
    if kind == "hip-radeon":
        kind = "rocm"
    if match["system"] == "macos" and match["architecture"] == "arm64":
        kind = "metal"
    version = version_of(match["version"] or "")
    return _ArchiveName(asset, match["system"], kind, version, match["architecture"])


def _is_for_backend(name: _ArchiveName, backend: str) -> bool:
    if backend == "cpu":
        # A Mac's archive also computes on the processor.
        return name.kind in ("cpu", "metal")
    return name.kind == backend


def _why_unfit(name: _ArchiveName, device: Device, host: BuildHost) -> str:
    """Return the reason why this archive does not run here, or ""."""
    if name.version is None:
        return ""
    needs = cuda.dotted(name.version)
    if name.kind == "cuda":
        if host.cuda_driver is not None and host.cuda_driver[0] < name.version[0]:
            own_version = cuda.dotted(host.cuda_driver)
            return (
                f"the archive for CUDA {needs} needs a newer driver (this one has "
                f"CUDA {own_version})"
            )
        cards = cuda.capabilities(device)
        if name.version[0] >= 13 and cards and cards[0] < _OLDEST_CUDA_13_CARD:
            return f"the archive for CUDA {needs} has no code for {cuda.dotted(cards[0])}"
    is_linux = host.system == "linux"
    if name.kind == "rocm" and is_linux and (host.rocm or name.version)[0] != name.version[0]:
        own_version = cuda.dotted(host.rocm or name.version)
        return f"the archive needs ROCm {needs}, and this system has {own_version}"
    return ""


def _cuda_libraries(release: Release, archive: Asset) -> Asset:
    """Return the archive with CUDA's own libraries that belongs to `archive`."""
    without_tag = archive.name.replace(f"-{release.tag}", "")
    names = (f"cudart-{archive.name}", f"cudart-{without_tag}")
    libraries = next((asset for asset in release.assets if asset.name in names), None)
    if libraries is None:
        raise SetupError(
            f"llama.cpp {release.title} has no archive with CUDA's libraries for {archive.name}",
            hint="name another release: localllm setup --engine bNNNNN",
        )
    return libraries
