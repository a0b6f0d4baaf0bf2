"""PDFs read by PDFium in a child process, within bounds of pages, bytes, memory and time; needs the
extra `pdf`.

Its native parsers meet bytes of anybody, so the process may crash, hang or grow. The child (`python
-m` this module) takes the PDF on standard input and answers with one JSON object: `pages`, each a
`text` or (where it has none, and the argument allows so many) a `picture` in base64, else neither;
or the `problem` why there are none.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

MOST_PAGES = 100
MOST_CHARS = 2_000_000
MOST_PICTURES = 20
CPU_S = 20
MEMORY_BYTES = 1536 * 2**20
# What models see of a page at most; a letter's text is legible then.
_PICTURE_SIDE = 1536
_JPEG_QUALITY = 85
# Longer than the child may compute, since others may keep it from computing.
_WHOLE_S = 3 * CPU_S
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
    """What `data` holds; blocks for as long as that takes. `pictures`: of pages without text, where
    a model sees them."""
    command = [
        sys.executable,
        "-m",
        "localllm.conversation.pdf",
        str(MOST_PICTURES if pictures else 0),
    ]
    try:
        done = subprocess.run(
            command, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=whole_s
        )
    except subprocess.TimeoutExpired:
        return Pdf(problem=f"the PDF could not be read within {whole_s:.0f} seconds")
    except OSError as e:
        return Pdf(problem=f"the PDF could not be read: {e.strerror or e}")
    if done.returncode:
        return Pdf(problem="the PDF is damaged, or takes too long or too much memory to read")
    answer = json.loads(done.stdout)
    if "problem" in answer:
        return Pdf(problem=str(answer["problem"]))
    return Pdf(
        tuple(Page(page.get("text", ""), page.get("picture", "")) for page in answer["pages"])
    )


# --- the child ------------------------------------------------------------------------------------


def pages_of(data: bytes, pictures: int) -> dict[str, Any]:
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(data) as document:
            if len(document) > MOST_PAGES:
                return {
                    "problem": f"the PDF has {len(document)} pages, {MOST_PAGES} at most are read"
                }
            if not len(document):
                return {"problem": "the PDF has no pages"}
            return _read(document, pictures)
    except pypdfium2.PdfiumError as e:
        if "password" in str(e).lower():
            return {"problem": "the PDF wants a password"}
        return {"problem": "the PDF is damaged"}


def _read(document: Any, pictures: int) -> dict[str, Any]:
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
            return {"problem": f"the PDF has more than {MOST_CHARS} characters"}
        if text:
            pages.append({"text": text})
        elif pictures > 0:
            pictures -= 1
            pages.append({"picture": _picture(page)})
        else:
            pages.append({})
        page.close()
    return {"pages": pages}


def _picture(page: Any) -> str:
    scale = min(4.0, _PICTURE_SIDE / max(*page.get_size(), 1.0))
    made = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(made, "JPEG", quality=_JPEG_QUALITY)
    return base64.b64encode(made.getvalue()).decode()


def _limit() -> None:
    """Bound this process's memory and time, where the system can."""
    try:
        import resource
    except ImportError:  # Windows: whoever waits for us bounds the time
        return
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(what, (most, most))
        except (OSError, ValueError):  # macOS takes no limit of address space
            pass


def main() -> None:
    data = sys.stdin.buffer.read()
    _limit()
    try:
        answer = pages_of(data, int(sys.argv[1]))
    except MemoryError:
        answer = {"problem": "the PDF takes too much memory"}
    except Exception as e:  # whatever a damaged file leads a library to
        answer = {"problem": f"the PDF is damaged ({type(e).__name__})"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
