"""`localllm recommend`: the plans worth running on this machine, or on one you name, with the arithmetic on request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.planner.plan import Overrides
    from localllm.planner.types import Plan, Workload
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model, Purpose

_PURPOSES = ("chat", "coding", "autocomplete", "long")


# As many parameters as the command has options, and as long for it: Typer reads them off the signature.
def recommend(
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help='Another machine, as you would type it: "M4 Max 128GB".'),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", help="What one model would need here, every variant."),
    ] = None,
    purpose: Annotated[
        str, typer.Option("--for", metavar="PURPOSE", help="chat, coding, autocomplete or long (documents).")
    ] = "chat",
    context: Annotated[
        int, typer.Option("--context", metavar="TOKENS", min=0, help="Context length (default: by purpose).")
    ] = 0,
    min_speed: Annotated[
        float, typer.Option("--min-speed", metavar="TOK_S", min=0.0, help="The slowest decode speed you would accept.")
    ] = 0.0,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, help="Requests to serve at once, each with that context.")
    ] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic of the first plan.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the roofline (to FILE.svg or FILE.png if given).")] = False,
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="With --plot: the picture to write.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", metavar="NAME", help="Compare with another machine (repeatable).")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every model that fits, and why others don't.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Predicted beside measured, for what was run here.")] = False,
    memory: Annotated[float | None, typer.Option("--memory", metavar="GB", help="The machine's memory in GB.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", metavar="GBPS", help="Its memory bandwidth in GB/s.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (localllm/planner/recommend.schema.json).")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never use the network (recommend never does).")] = False,
) -> None:
    """Recommend models for this machine, with the memory and the speed to expect."""
    from localllm.cli import recommend_view as view
    from localllm.errors import UsageError
    from localllm.library.catalog import load_catalog
    from localllm.planner import recommend as planner
    from localllm.planner.types import Workload

    if purpose not in _PURPOSES:
        raise UsageError(f"--for {purpose}: not a purpose", hint=f"one of: {', '.join(_PURPOSES)}", param="--for")
    if file is not None and not plot:
        raise UsageError(f"{file!r} is only read with --plot", hint="localllm recommend --plot roofline.svg")
    workload = Workload(_purpose(purpose), context, parallel=parallel, min_decode_tok_s=min_speed)
    catalog = load_catalog()
    machine = _device(device, memory, bandwidth)
    overrides = _overrides(machine, catalog)
    if check:
        view.out(view.check(machine, catalog, as_json=as_json))
        return
    if model is not None:
        one = find_model(model, catalog)
        plans = planner.variants_of(machine, one, workload, overrides=overrides)
        best = max((p for p in plans if p.fits != "no"), key=lambda p: p.score, default=None)
        if best is not None:
            plain, best = best, planner.detailed_plan(machine, best, catalog.models, workload, overrides)
            plans = [best if p is plain else p for p in plans]
        _show_model(one, plans, best, machine, workload, explain=explain, as_json=as_json)
        return
    answer = planner.recommend(machine, catalog.models, workload, overrides=overrides, limit=0 if everything else 8)
    if plot:
        _plot(machine, list(answer.plans), file)
        return
    if what_if:
        others = [_device(name, None, None) for name in what_if]
        answers = [
            answer,
            *(planner.recommend(d, catalog.models, workload, overrides=_overrides(d, catalog)) for d in others),
        ]
        view.out(view.comparison([machine, *others], answers, as_json=as_json))
        return
    if as_json:
        view.out([view.json_text(answer, machine)])
        return
    view.out(view.table(answer, machine, everything=everything))
    if explain and answer.plans:
        from localllm.planner.explain import explain as lines

        view.out(["", *lines(answer.plans[0], machine)])


def _purpose(name: str) -> Purpose:
    from typing import cast

    return cast("Purpose", name)


def _device(name: str | None, memory: float | None, bandwidth: float | None) -> Device:
    from localllm.device.detect import detect
    from localllm.device.named import overridden, resolve

    if name is not None:
        return resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
    # The first time on an unknown machine its bandwidth is measured (a second), then remembered.
    return overridden(detect(measure=True), memory_gb=memory, bandwidth_gbps=bandwidth)


def _overrides(device: Device, catalog: Catalog) -> Overrides:
    from localllm.cli import measurements
    from localllm.planner.plan import Overrides

    engines = registered_backends()
    if device.simulated:
        return Overrides(backends=engines)
    measured = measurements.for_planner(measurements.load(), device.name, catalog.by_id)
    return Overrides(measured=measured, backends=engines)


def registered_backends() -> tuple[str, ...]:
    """Names of the engines this installation has: what it can't run it does not recommend, on any machine."""
    from importlib.metadata import entry_points

    return tuple(sorted({entry.name for entry in entry_points(group="localllm.backends")})) or ("llamacpp",)


def find_model(reference: str, catalog: Catalog) -> Model:
    """A catalog id, or the header of a GGUF file on this disk. Raises ModelNotFoundError, ModelFileError."""
    from localllm.errors import ModelNotFoundError
    from localllm.library.catalog import read_model

    path = Path(reference).expanduser()
    if path.suffix == ".gguf" and path.exists():
        return read_model(path)
    found = catalog.get(reference.partition(":")[0])
    if found is None:
        near = catalog.suggest(reference)
        hint = f"did you mean {', '.join(near)}?" if near else "see `localllm models list`"
        raise ModelNotFoundError(f"the catalog has no model {reference!r}", hint=hint)
    return found


def _show_model(
    model: Model,
    plans: list[Plan],
    best: Plan | None,
    device: Device,
    workload: Workload,
    *,
    explain: bool,
    as_json: bool,
) -> None:
    from localllm.cli import recommend_view as view
    from localllm.errors import ModelNotFoundError
    from localllm.planner.types import Recommendation

    if not plans:
        raise ModelNotFoundError(
            f"{model.name} has no files that this machine's engines can read", hint="see `localllm models info`"
        )
    if as_json:
        view.out([view.json_text(Recommendation(tuple(plans), (), workload), device)])
        return
    view.out(view.model_table(model, plans, device))
    if best is not None:
        view.out(view.further(best, f"about {best.variant.quant}, the best of them here:"))
    if explain:
        from localllm.planner.explain import explain as lines

        view.out(["", *lines(best or plans[0], device)])


def _plot(device: Device, plans: list[Plan], file: str | None) -> None:
    import sys

    from localllm.cli import recommend_view as view
    from localllm.planner import roofline

    picture = roofline.of(device, plans)
    if file is None:
        view.out(roofline.text(picture))
        return
    target = Path(file)
    if target.suffix == ".png":
        from localllm.planner.roofline_png import png

        target.write_bytes(png(picture))
    else:
        target.write_text(roofline.svg(picture), encoding="utf-8")
    print(f"wrote {target}", file=sys.stderr)
