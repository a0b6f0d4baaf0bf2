"""Write small safetensors files."""

from __future__ import annotations

import json
import struct


def safetensors(content: bytes) -> bytes:
    """Return a safetensors file with one tensor of these bytes."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"__metadata__": {"format": "mlx"}, "weights": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + content
