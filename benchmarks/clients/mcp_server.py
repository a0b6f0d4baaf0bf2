"""An MCP server on standard input and output, with one tool that takes large numbers."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "count_birds",
    "description": "Counts birds.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 9_007_199_254_740_991},
        },
        "required": ["place", "limit"],
        "additionalProperties": False,
    },
}


def answer(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one request."""
    if method == "initialize":
        version = given.get("protocolVersion", "2025-06-18")
        return {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "birds", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        right = given.get("arguments") == {"place": "the pond", "limit": 1_234_567}
        said = "41 geese were counted" if right else f"wrong arguments: {given.get('arguments')!r}"
        return {"content": [{"type": "text", "text": said}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        reply = {
            "jsonrpc": "2.0",
            "id": asked["id"],
            "result": answer(asked["method"], asked.get("params") or {}),
        }
        print(json.dumps(reply), flush=True)
