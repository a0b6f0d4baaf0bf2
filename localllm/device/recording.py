"""A machine's readings as one text, for an issue: what its probes read, in the form of
tests/device/recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.device.types import Readings

# Numbers that name one copy of a part say nothing of what it can do.
_NUMBERS_OF_ONE = re.compile(r"""(?i)((?:serial|uuid|asset_tag)[\w-]*"?\s*[=:]\s*"?)[^"\n,}]+""")


def recorded(readings: Readings, machine: str, source: str, checks: Sequence[str] = ()) -> str:
    """The text; `checks`: what `doctor` says of the machine, among the comments."""
    head = [
        f"# machine: {machine}",
        f"# source: {source}",
        f"# system: {readings.system} {readings.architecture}",
    ]
    head += [f"#   {line}".rstrip() for line in checks]
    sections = [("file", path, text) for path, text in readings.files.items()]
    sections += [("output", name, text) for name, text in readings.outputs.items()]
    body = [f"=== {kind} {name}\n{text.rstrip()}" for kind, name, text in sections]
    return _NUMBERS_OF_ONE.sub(r"\1removed", "\n".join([*head, *body, ""]))
