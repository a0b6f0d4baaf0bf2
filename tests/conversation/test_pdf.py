"""Untrusted PDFs are read in a child process with limits."""

from __future__ import annotations

import base64
import io
import random

import pytest

from localllm.conversation import pdf as reading
from support.pdfs import needs_pdf, pdf

pytestmark = needs_pdf()


def test_pages_without_text_become_pictures_if_the_model_reads_images() -> None:
    data = pdf(["first page", "", "third page"])
    found = reading.read(data, pictures=True)
    assert [page.text for page in found.pages] == ["first page", "", "third page"]
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(found.pages[1].picture))) as picture:
        assert picture.format == "JPEG"
        assert max(picture.size) == 1200  # 300 points at a scale of four
    blind = reading.read(data, pictures=False)
    assert [page.picture for page in blind.pages] == ["", "", ""]


def test_a_pdf_beyond_the_limits_is_reported() -> None:
    assert "101 pages" in reading.read(pdf(["x"] * 101), pictures=False).problem
    assert len(reading.read(pdf(["x"] * 100), pictures=False).pages) == 100
    # A page of 5,000 km per side is still rendered as one picture, or refused.
    large = reading.read(pdf([""], side=14_400_000), pictures=True)
    assert large.problem or large.pages[0].picture


def test_pictures_and_characters_of_a_pdf_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reading.pages_of(pdf(["", "", "x"]), 1)
    assert [sorted(page) for page in found] == [["picture"], [], ["text"]]
    monkeypatch.setattr(reading, "MAX_CHARS", 15)
    with pytest.raises(ValueError, match="15 characters"):
        reading.pages_of(pdf(["ten letters", "ten letters"]), 0)


def test_a_scan_in_high_resolution_is_read() -> None:
    from PIL import Image

    noise = random.Random(1).randbytes(620 * 877 * 3)
    page = Image.frombytes("RGB", (620, 877), noise).resize((4960, 7016))
    scan = io.BytesIO()
    page.save(scan, "PDF", resolution=600, quality=60)
    (found,) = reading.read(scan.getvalue(), pictures=True).pages
    assert found.picture


def test_a_pdf_that_takes_too_long_is_abandoned() -> None:
    assert "within 0 seconds" in reading.read(pdf(["x"]), pictures=False, time_limit_s=0.01).problem


@pytest.mark.parametrize(
    "data", [b"%PDF-1.7", b"%PDF-1.4\n" + b"<<" * 100_000, pdf(["x"])[:200], b""]
)
def test_a_damaged_pdf_is_reported(data: bytes) -> None:
    found = reading.read(data, pictures=True)
    assert found.problem
    assert not found.pages


@pytest.mark.parametrize("n", [8, pytest.param(300, marks=pytest.mark.long)])
def test_any_change_to_a_pdf_gives_pages_or_a_problem(n: int) -> None:
    chance = random.Random(7)
    whole = pdf(["first page", "", "third page"])
    for _ in range(n):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 30)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        found = reading.read(bytes(data), pictures=True)
        assert bool(found.problem) != bool(found.pages)
