"""Format a machine's readings as text for an issue, in the format of tests/device/recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.device.types import Readings

# Serial numbers and other identifiers of a single unit do not affect what it can do.
_IDENTIFIERS = re.compile(r"""(?i)((?:serial|uuid|asset_tag)[\w-]*"?\s*[=:]\s*"?)[^"\n,}]+""")


def recording_text(
    readings: Readings, machine: str, source: str, checks: Sequence[str] = ()
) -> str:
    """Return the text. `checks` are lines from `doctor`, added as comments."""
    header = [
        f"# machine: {machine}",
        f"# source: {source}",
        f"# system: {readings.system} {readings.architecture}",
    ]
    header += [f"#   {line}".rstrip() for line in checks]
    sections = [("file", path, text) for path, text in readings.files.items()]
    sections += [("output", name, text) for name, text in readings.outputs.items()]
    body = [f"=== {kind} {name}\n{text.rstrip()}" for kind, name, text in sections]
    return _IDENTIFIERS.sub(r"\1removed", "\n".join([*header, *body, ""]))
