"""PDFs for tests, written by hand, and a mark that skips a test if the extra for reading them is
not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest


def needs_pdf() -> pytest.MarkDecorator:
    """Skip the test visibly if pypdfium2 is not installed."""
    found = importlib.util.find_spec("pypdfium2") is not None
    return pytest.mark.skipif(not found, reason="pypdfium2 is not installed (the extra pdf)")


def pdf(pages: Sequence[str], *, side: int = 300) -> bytes:
    """Return a file with a page for each text. A page with an empty text has a grey square
    instead."""
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        font,
    ]
    for i, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET" if text else "0.5 g 20 20 200 200 re f"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {side} {side}] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream".encode())
    made = bytearray(b"%PDF-1.4\n")
    offsets = []
    for i, body in enumerate(objects):
        offsets.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (i + 1, body)
    start = len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    made += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    made += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        start,
    )
    return bytes(made)
