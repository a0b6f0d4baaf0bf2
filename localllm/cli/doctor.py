"""`localllm doctor`: what was found, what is missing or wrong, and the exact command that fixes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from localllm.device.health import Check


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine and this installation. Says what it could not check, and changes nothing."""
    import json
    from dataclasses import asdict

    from localllm import paths
    from localllm.device.describe import device_to_json
    from localllm.device.detect import detect
    from localllm.device.health import judge
    from localllm.device.probes import health

    found = detect()
    checks = judge(found, health.read(paths.cache_dir(), paths.data_dir()))
    if as_json:
        body = {"device": device_to_json(found), "checks": [asdict(check) for check in checks]}
        print(json.dumps(body, indent=2, ensure_ascii=False))
        return
    print("\n".join(lines(checks)))


def lines(checks: list[Check]) -> list[str]:
    """One line per check, the fix under it, and a count that claims nothing about what was not checked."""
    width = max(len(check.name) for check in checks)
    out = []
    for check in checks:
        out.append(f"{check.status.upper():<11}  {check.name:<{width}}  {check.message}")
        if check.fix:
            out.append(f"{'':<11}  {'':<{width}}  fix: {check.fix}")
    counts = {
        status: sum(check.status == status for check in checks) for status in ("ok", "warning", "error", "not checked")
    }
    said = f"{counts['error']} error(s), {counts['warning']} warning(s), {counts['ok']} check(s) passed"
    if counts["not checked"]:
        said += f", {counts['not checked']} not checked"
    return [*out, "", said]
