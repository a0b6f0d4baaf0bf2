"""Put a release of llama.cpp into a build's folder: its libraries and the headers of its source."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from localllm.device.types import Device
from localllm.setup import archives, releases
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, version_of
from localllm.setup.releases import Release, ReleaseSource

# Puts the release with a tag, for an accelerator, into a folder.
FetchRelease = Callable[[str, str, Path], Release]
LIBRARIES = "lib"
HEADERS = "include"


def fetch(
    source: ReleaseSource,
    device: Device,
    host: BuildHost,
    report: Callable[[str], None],
    tag: str,
    backend: str,
    folder: Path,
) -> Release:
    """Download the release's archives for this machine, and unpack them into `folder`.

    Raises LocalLLMErrors: DownloadError and SetupError.
    """
    release = source.find(tag)
    for asset in releases.choose(release, backend, device, host):
        report(f"   {asset.name} ({asset.size_bytes / 1e6:.0f} MB)")
        archive = Path(source.download(asset, str(folder / "download")))
        archives.unpack(archive, folder / LIBRARIES)
        archive.unlink()
    (macos, _, _) = platform.mac_ver()
    reason = archives.too_new(folder / LIBRARIES, host.glibc, version_of(macos))
    if reason:
        raise SetupError(
            f"llama.cpp {release.title} does not run on this system: {reason}",
            hint="`localllm setup` compiles llama.cpp here",
        )
    (folder / HEADERS).mkdir()
    for header in source.headers(release.tag):
        downloaded = Path(source.download(header, str(folder / "download")))
        downloaded.replace(folder / HEADERS / header.name)
    shutil.rmtree(folder / "download", ignore_errors=True)
    return release
