"""Send recorded requests to a server again.

python -m benchmarks clients replay FILE [--url http://localhost:11535] [--path
/v1/chat/completions] [--key KEY]

FILE is `exchanges.txt` of a run of `clients loops`, or the body of one request as JSON.

"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import httpx

_RECORDED = re.compile(r"(?m)^### (\w+) (\S+) -> (\d+)\n.*\n(.*)$")


def requests(file: Path, path: str) -> list[tuple[str, str, str, str]]:
    """Return method, path, body and recorded status of each request in the file."""
    text = file.read_text(encoding="utf-8")
    found = [(method, at, body, status) for method, at, status, body in _RECORDED.findall(text)]
    return found or [("POST", path, json.dumps(json.loads(text)), "")]


def main() -> None:
    """Send the requests in their order, and print the replies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", default="http://localhost:11535")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--key", default="local")
    given = parser.parse_args()
    headers = {"authorization": f"Bearer {given.key}", "content-type": "application/json"}
    with httpx.Client(base_url=given.url, headers=headers, timeout=300, trust_env=False) as client:
        for method, path, body, before in requests(given.file, given.path):
            reply = client.request(method, path, content=None if body == "null" else body)
            print(
                f"### {method} {path} -> "
                f"{reply.status_code}{f' (was {before})' if before else ''}\n{reply.text}\n"
            )


if __name__ == "__main__":
    main()
