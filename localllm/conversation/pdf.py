"""PDFs read in a child process (`pdf_child.py`), within bounds of pages, bytes and time; needs the extra `pdf`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

from localllm.conversation.pdf_child import CPU_S, MOST_PICTURES

# Longer than the child may compute, since others may keep it from computing.
_WHOLE_S = 3 * CPU_S
MISSING = "PDFs are read by an extra that is not installed here: pip install 'localllm[pdf]'"


@dataclass(frozen=True, slots=True)
class Page:
    """A page's text, or a picture of it (JPEG in base64) where it has none; neither where nobody sees pictures."""

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
    """What `data` holds; blocks for as long as that takes. `pictures`: of pages without text, where a model sees them."""
    command = [sys.executable, "-m", "localllm.conversation.pdf_child", str(MOST_PICTURES if pictures else 0)]
    try:
        done = subprocess.run(command, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=whole_s)
    except subprocess.TimeoutExpired:
        return Pdf(problem=f"the PDF could not be read within {whole_s:.0f} seconds")
    except OSError as e:
        return Pdf(problem=f"the PDF could not be read: {e.strerror or e}")
    if done.returncode:
        return Pdf(problem="the PDF is damaged, or takes too long or too much memory to read")
    answer = json.loads(done.stdout)
    if "problem" in answer:
        return Pdf(problem=str(answer["problem"]))
    return Pdf(tuple(Page(page.get("text", ""), page.get("picture", "")) for page in answer["pages"]))
