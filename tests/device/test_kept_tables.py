"""The cached tables of parts and names mean the same as the source table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from localllm.device import name_lookup

NAMES = ("M4 Max 128GB", "2x 3090 + 64GB DDR4", "rtx 4070 ti super", "dgx spark", "ryzen 7 7840hs")
RESOLVE = """
import sys
from localllm.device import name_lookup
print([name_lookup.resolve(name) for name in sys.argv[1:]])
"""


def resolved(cache: Path) -> str:
    """Return the machines of `NAMES` as another process with that cache folder resolves them."""
    ran = subprocess.run(
        [sys.executable, "-c", RESOLVE, *NAMES],
        env={**os.environ, "LOCALLLM_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ran.stdout.strip()


def test_cached_tables_give_the_same_machines(tmp_path: Path) -> None:
    expected = str([name_lookup.resolve(name) for name in NAMES])
    assert resolved(tmp_path) == expected
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"cpus.json", "devices.json", "device-words.json"}
    assert resolved(tmp_path) == expected


def test_machines_are_found_without_a_writable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    expected = str([name_lookup.resolve(name) for name in NAMES])
    assert resolved(tmp_path / "cache") == expected
