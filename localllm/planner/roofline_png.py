"""Draws a Roofline as PNG bytes with the standard library alone: lines, dots and a small built-in letter set."""

from __future__ import annotations

import struct
import zlib

from localllm.planner import roofline
from localllm.planner.roofline import Roofline

Colour = tuple[int, int, int]
_WHITE, _GREY, _BLACK = (255, 255, 255), (221, 221, 221), (40, 40, 40)
_RED, _BLUE = (192, 57, 43), (44, 95, 138)

# Five columns of seven bits (lowest bit on top) per sign; labels are drawn in capitals.
_GLYPHS = {
    "0": "3E5149453E", "1": "00427F4000", "2": "7249494946", "3": "2141494D33", "4": "1814127F10", "5": "2745454539",
    "6": "3C4A494931", "7": "4121110907", "8": "3649494936", "9": "464949291E", "A": "7C1211127C", "B": "7F49494936",
    "C": "3E41414122", "D": "7F4141413E", "E": "7F49494941", "F": "7F09090901", "G": "3E41415173", "H": "7F0808087F",
    "I": "00417F4100", "J": "2040413F01", "K": "7F08142241", "L": "7F40404040", "M": "7F021C027F", "N": "7F0408107F",
    "O": "3E4141413E", "P": "7F09090906", "Q": "3E4151215E", "R": "7F09192946", "S": "2649494932", "T": "03017F0103",
    "U": "3F4040403F", "V": "1F2040201F", "W": "3F4038403F", "X": "6314081463", "Y": "0304780403", "Z": "6159494D43",
    ".": "0000606000", ",": "0000503000", "-": "0808080808", "/": "2010080402", "(": "001C224100", ")": "0041221C00",
    ":": "0000363600", "%": "2313086462", "_": "4040404040", "+": "08083E0808", "*": "2A1C7F1C2A", ";": "0000563600",
}  # fmt: skip


class _Canvas:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.pixels = bytearray(bytes(_WHITE) * (width * height))

    def dot(self, x: int, y: int, colour: Colour) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            at = 3 * (y * self.width + x)
            self.pixels[at : at + 3] = bytes(colour)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: Colour, thick: int = 1) -> None:
        steps = max(1, round(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
        for i in range(steps + 1):
            x = round(start[0] + (end[0] - start[0]) * i / steps)
            y = round(start[1] + (end[1] - start[1]) * i / steps)
            for offset in range(thick):
                self.dot(x, y + offset, colour)

    def disc(self, centre: tuple[float, float], radius: int, colour: Colour) -> None:
        for dy in range(-radius, radius + 1):
            for dx in range(-radius, radius + 1):
                if dx * dx + dy * dy <= radius * radius:
                    self.dot(round(centre[0]) + dx, round(centre[1]) + dy, colour)

    def text(self, x: float, y: float, words: str, colour: Colour = _BLACK, scale: int = 1) -> None:
        left = round(x)
        for sign in words.upper():
            columns = bytes.fromhex(_GLYPHS.get(sign, "0000000000"))
            for i, column in enumerate(columns):
                for bit in range(7):
                    if column >> bit & 1:
                        for dy in range(scale):
                            for dx in range(scale):
                                self.dot(left + i * scale + dx, round(y) + bit * scale + dy, colour)
            left += 6 * scale

    def png(self) -> bytes:
        rows = b"".join(
            b"\0" + bytes(self.pixels[3 * y * self.width : 3 * (y + 1) * self.width]) for y in range(self.height)
        )
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in chunks
        )


def png(picture: Roofline) -> bytes:
    """The picture as a PNG file's bytes."""
    width, height, left, top, right, bottom = roofline.FRAME
    canvas = _Canvas(width, height)
    canvas.text(left, 14, picture.title, scale=2)
    canvas.text(left, 38, picture.note)
    for value in roofline.decades(picture.x_range):
        x, _ = roofline.place(picture, value, picture.y_range[0])
        canvas.line((x, top), (x, height - bottom), _GREY)
        canvas.text(x - 3 * len(f"{value:g}"), height - bottom + 8, f"{value:g}")
    for value in roofline.decades(picture.y_range):
        _, y = roofline.place(picture, picture.x_range[0], value)
        canvas.line((left, y), (width - right, y), _GREY)
        canvas.text(left - 8 - 6 * len(f"{value:g}"), y - 3, f"{value:g}")
    canvas.line(*roofline.roof_ends(picture), _RED, thick=2)
    for point, (x, y) in zip(picture.points, roofline.label_spots(picture), strict=True):
        canvas.disc(roofline.place(picture, point.gb_per_token, point.tok_s), 4, _BLUE)
        canvas.text(x, y - 3, point.label)
    canvas.text(width / 2 - 90, height - 22, "GB of weights read per token")
    canvas.text(10, top - 14, "tok/s")
    return canvas.png()
