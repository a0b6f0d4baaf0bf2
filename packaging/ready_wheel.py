"""Print the version of llama-cpp-python that its own index has ready for this machine.

    python packaging/ready_wheel.py INDEX 'llama-cpp-python>=0.3.36,<0.4'

INDEX is the address of a simple package index. The program prints a version and ends with 0, or it
prints a reason and ends with 1. It uses the packages inside pip, which every new environment has.
It waits 3 seconds for the index at most.
"""

from __future__ import annotations

import re
import sys
import threading
import urllib.request
from html import unescape
from urllib.parse import unquote

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import InvalidWheelFilename, parse_wheel_filename

LIMIT_S = 3.0
MOST_BYTES = 8 << 20
_LINK = re.compile(r"<a\s[^>]*?href=[\"']([^\"']+)[\"']", re.IGNORECASE)


def newest(page: str, wanted: Requirement) -> str:
    """Return the newest version among the page's wheels that is wanted and fits, or ""."""
    tags = set(sys_tags())
    found = []
    for link in _LINK.findall(page):
        file = unquote(unescape(link)).partition("#")[0].rpartition("/")[2]
        try:
            name, version, _, wheel_tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        fits = name == wanted.name and not tags.isdisjoint(wheel_tags)
        if fits and version in wanted.specifier:
            found.append(version)
    if not found:
        return ""
    return str(max(found))


def fetched(url: str) -> str:
    """Return the page, or raise OSError. A thread is used, since a name server may not answer."""
    pages: list[str] = []
    errors: list[Exception] = []

    def fetch() -> None:
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
                pages.append(answer.read(MOST_BYTES).decode("utf-8", "replace"))
        except (OSError, ValueError) as e:
            errors.append(e)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if pages:
        return pages[0]
    if errors:
        raise OSError(str(errors[0]))
    raise OSError(f"no answer within {LIMIT_S:.0f} s")


def main(index: str, requirement: str) -> int:
    wanted = Requirement(requirement)
    url = f"{index.rstrip('/')}/{wanted.name}/"
    try:
        page = fetched(url)
    except OSError as e:
        print(f"{url} can't be reached ({e})")
        return 1
    version = newest(page, wanted)
    if not version:
        print(f"{url} has no wheel of {requirement} for this machine")
        return 1
    print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
