"""PDFs read by PDFium in a child process, within bounds of pages, bytes, memory and time; needs the
extra `pdf`.

Its native parsers meet bytes of anybody, so the process may crash, hang or grow. A `LimitedChild`
runs this module: asked with the PDF in base64 and how many pictures it may make, it answers with
pages, each a `text` or (where it has none) a `picture` in base64, else neither; or says why there
are none.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.limited_child import ChildError, ChildLimits, LimitedChild, RefusedError, serve

MOST_PAGES = 100
MOST_CHARS = 2_000_000
MOST_PICTURES = 20
_LIMITS = ChildLimits(cpu_s=20.0, memory_bytes=1536 * 2**20)
# What models see of a page at most; a letter's text is legible then.
_PICTURE_SIDE = 1536
_JPEG_QUALITY = 85
# Longer than the child may compute, since others may keep it from computing.
_WHOLE_S = 3 * _LIMITS.cpu_s
MISSING = "PDFs are read by an extra that is not installed here: pip install 'localllm[pdf]'"


@dataclass(frozen=True, slots=True)
class Page:
    """A page's text, or a picture of it (JPEG in base64) where it has none; neither where nobody
    sees pictures."""

    text: str = ""
    picture: str = ""


@dataclass(frozen=True, slots=True)
class Pdf:
    """The pages of a PDF, or the problem why there are none."""

    pages: tuple[Page, ...] = ()
    problem: str = ""


def installed() -> bool:
    return importlib.util.find_spec("pypdfium2") is not None


def read(data: bytes, *, pictures: bool, whole_s: float = _WHOLE_S) -> Pdf:
    """Read the PDF `data`; blocks until the child has answered. `pictures`: make pictures of pages
    without text, for a model that sees them."""
    child = LimitedChild("localllm.conversation.pdf", _LIMITS)
    until_s = time.monotonic() + whole_s

    def has_time() -> bool:
        return time.monotonic() < until_s

    question = [base64.b64encode(data).decode(), MOST_PICTURES if pictures else 0]
    try:
        pages = child.ask(question, wanted=has_time)
    except RefusedError as e:
        return Pdf(problem=e.message)
    except ChildError as e:
        if not has_time():
            return Pdf(problem=f"the PDF could not be read within {whole_s:.0f} seconds")
        return Pdf(problem=f"the PDF is damaged, or too much to read: {e.message}")
    finally:
        child.close()
    return Pdf(tuple(Page(**page) for page in pages))


# --- the child ------------------------------------------------------------------------------------


def pages_of(data: bytes, pictures: int) -> list[dict[str, str]]:
    """Raises ValueError, saying why there are none."""
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(data) as document:
            if len(document) > MOST_PAGES:
                raise ValueError(
                    f"the PDF has {len(document)} pages, {MOST_PAGES} at most are read"
                )
            if not len(document):
                raise ValueError("the PDF has no pages")
            return _read(document, pictures)
    except pypdfium2.PdfiumError as e:
        if "password" in str(e).lower():
            raise ValueError("the PDF wants a password") from e
        raise ValueError("the PDF is damaged") from e


def _read(document: Any, pictures: int) -> list[dict[str, str]]:
    pages: list[dict[str, str]] = []
    chars = 0
    for page in document:
        textpage = page.get_textpage()
        text = textpage.get_text_bounded().replace("\r\n", "\n").replace("\0", "").strip()
        # Halves of pairs, as broken fonts have them, are no text that anybody can encode.
        text = text.encode("utf-8", "replace").decode()
        textpage.close()
        chars += len(text)
        if chars > MOST_CHARS:
            raise ValueError(f"the PDF has more than {MOST_CHARS} characters")
        if text:
            pages.append({"text": text})
        elif pictures > 0:
            pictures -= 1
            pages.append({"picture": _picture(page)})
        else:
            pages.append({})
        page.close()
    return pages


def _picture(page: Any) -> str:
    scale = min(4.0, _PICTURE_SIDE / max(*page.get_size(), 1.0))
    made = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(made, "JPEG", quality=_JPEG_QUALITY)
    return base64.b64encode(made.getvalue()).decode()


def _answer(question: list[Any]) -> list[dict[str, str]]:
    encoded, pictures = question
    return pages_of(base64.b64decode(encoded), pictures)


def _answerer(setup: object) -> Callable[[list[Any]], list[dict[str, str]]]:
    return _answer


if __name__ == "__main__":
    serve(_answerer)
