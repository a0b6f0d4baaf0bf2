"""A smaller model for tests: the first layers of a real GGUF, with its embedding, norm and
vocabulary."""

from __future__ import annotations

import re
import struct
from pathlib import Path

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Header:
    """Reads the bytes of a GGUF's header. `gguf.GGUFReader` takes seconds for a vocabulary, because
    it makes an array for each word."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def string(self) -> bytes:
        end = self.number("Q") + self.at
        text = bytes(self.data[self.at : end])
        self.at = end
        return text

    def skip(self, kind: int) -> None:
        """Skip a value of this kind."""
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            kind, n = self.number("I"), self.number("Q")
            if kind in _SIZES:
                self.at += n * _SIZES[kind]
                return
            for _ in range(n):
                self.skip(kind)
        else:
            self.at += _SIZES[kind]


def write_first_layers(
    source: Path, target: Path, n_layers: int, template: str | None = None
) -> Path:
    """Write `source` with only its first `n_layers` blocks to `target`. Its metadata stay the same,
    byte for byte, except for the chat template if `template` is given."""
    data = memoryview(source.read_bytes())
    header = Header(data)
    header.at = 8
    n_tensors, n_fields = header.number("Q"), header.number("Q")
    begin, alignment, blocks, place = header.at, 32, 0, slice(0)
    for _ in range(n_fields):
        name, kind = header.string(), header.number("I")
        if name == b"general.alignment":
            (alignment,) = struct.unpack_from("<I", data, header.at)
        if name.endswith(b".block_count"):
            blocks = header.at
        at = header.at
        header.skip(kind)
        if name == b"tokenizer.chat_template":
            place = slice(at - begin, header.at - begin)
    fields = bytearray(data[begin : header.at])
    assert blocks, "a model says how many blocks it has"
    (n_blocks,) = struct.unpack_from("<I", fields, blocks - begin)
    struct.pack_into("<I", fields, blocks - begin, min(n_layers, n_blocks))
    if template is not None:
        text = template.encode()
        fields[place] = struct.pack("<Q", len(text)) + text

    # (position of its data offset, the tensor's header up to that)
    tensors: list[tuple[int, bytes]] = []
    for _ in range(n_tensors):
        start = header.at
        header.string()
        n_dimensions = header.number("I")
        header.at += 8 * n_dimensions + 4
        tensors.append((header.at, bytes(data[start : header.at])))
        header.at += 8
    first = -(-header.at // alignment) * alignment
    begins = [first + struct.unpack_from("<Q", data, at)[0] for at, _ in tensors]
    ends = dict(zip(sorted(begins), [*sorted(begins)[1:], len(data)], strict=True))

    infos, bodies, offset = b"", [], 0
    for (_, said), where in zip(tensors, begins, strict=True):
        block = re.match(rb"blk\.(\d+)\.", said[8:])
        if block is not None and int(block.group(1)) >= n_layers:
            continue
        body = bytes(data[where : ends[where]])
        body += b"\0" * (-len(body) % alignment)
        infos += said + struct.pack("<Q", offset)
        offset += len(body)
        bodies.append(body)
    head = bytes(data[:8]) + struct.pack("<QQ", len(bodies), n_fields) + fields + infos
    with target.open("wb") as file:
        file.write(head + b"\0" * (-len(head) % alignment))
        file.writelines(bodies)
    return target
