"""How `recommend` looks: tables as wide as the terminal, memory bars, JSON. Plain text; nothing here decides anything."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from localllm.formatting import gb, mb, rate
from localllm.memory.verdict import TIGHT_MEANS
from localllm.plain_output import ascii_json
from localllm.planner.needs import span
from localllm.planner.types import backend_of
from localllm_backends import registry

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.planner.recommend import Reach
    from localllm.planner.types import Plan, Range, Recommendation
    from localllm_backends.declaration import Declaration
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model

# Narrower than this tables can't be read anyway; wider than this sentences can't.
_NARROWEST, _WIDEST = 60, 160
_BAR = 10
# What a row takes beside the model's name, and with the bar; a name shorter than this costs the bar its place.
_ROW_COLUMNS = 43
_LEAST_NAME = 20
_NEARLY_SHOWN = 2
# A plain list is read at one glance.
_MOST_LINES = 25
# Plans of each machine where machines are compared.
_COMPARED = 4


def out(lines: Iterable[str]) -> None:
    """Print lines to stdout; signs the terminal's encoding lacks become plain ones."""
    encoding = sys.stdout.encoding or "utf-8"
    plain = str.maketrans({"█": "#", "░": ".", "–": "-", "×": "x", "≥": ">=", "…": "...", "·": ".", "─": "-", "µ": "u"})
    for line in lines:
        try:
            line.encode(encoding)
        except UnicodeEncodeError:
            line = line.translate(plain).encode(encoding, "replace").decode(encoding)
        print(line)


def width() -> int:
    """Columns to fill: the terminal's, or 80 where there is none (COLUMNS says otherwise)."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def _wrapped(text: str, first: str = "", further: str = "") -> list[str]:
    return textwrap.wrap(text, width(), initial_indent=first, subsequent_indent=further, break_on_hyphens=False)


def bar(share: float, width: int = _BAR) -> str:
    """A bar of `width` characters filled to `share` (clamped to 0..1; any use at all shows one block)."""
    filled = min(width, max(1 if share > 0 else 0, round(share * width)))
    return "█" * filled + "░" * (width - filled)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _speed(value: Range) -> str:
    return f"{rate(value.low)}–{rate(value.high)}"


def heading(device: Device, what: str) -> list[str]:
    """What is shown, and what the machine offers with how that is known."""
    known = device.bandwidth_gbps
    bandwidth = f"{known.value:,.0f} GB/s ({known.basis})" if known else "bandwidth unknown"
    memory = device.memory
    free = ""
    if memory.available_bytes < device.room_bytes:
        free = f", {gb(memory.available_bytes)} free now"
    beside = ""
    if device.kind == "discrete" and device.host is not None:
        rate_of_host = device.host_bandwidth_gbps
        at = f" at {rate_of_host.value:,.0f} GB/s ({rate_of_host.basis})" if rate_of_host else ""
        beside = f"; beside it {gb(device.host.limit_bytes)} of system memory{at}"
    usable = f"{gb(device.room_bytes)} usable of {memory.total_bytes / 1e9:.1f}{free}; {bandwidth}{beside}"
    return [
        *_wrapped(f"{what} on {device.name}{' (simulated)' if device.simulated else ''}", further="  "),
        *_wrapped(usable, further="  "),
        *chain.from_iterable(_wrapped(account, further="  ") for account in device.accounts),
    ]


Installed = frozenset[tuple[str, str]]
_NOTHING: Installed = frozenset()


def _marked(plan: Plan, installed: Installed) -> str:
    """The quant with what the footnotes explain: ~ constructed, * another engine, + on this disk."""
    here = (plan.model.id, plan.variant.quant) in installed
    made = "~" if plan.variant.is_estimate and not here else ""
    return f"{made}{plan.variant.quant}{'*' if plan.backend != _usual().name else ''}{'+' if here else ''}"


def _rows(plans: Sequence[Plan], installed: Installed) -> tuple[str, list[str]]:
    """The head and a row for each plan; narrow terminals lose the bar, wide ones show names whole."""
    room = width() - _ROW_COLUMNS
    with_bar = room - _BAR - 1 >= _LEAST_NAME
    name = min(max([_LEAST_NAME, *(len(p.model.name) for p in plans)]), room - (_BAR + 1 if with_bar else 0))
    usable = f"{'of usable':{_BAR}} " if with_bar else ""
    head = f"    {'model':{name}} {'quant':12} {'memory':>8} {usable}{'tok/s':>9} {'wait':>6}"
    rows = []
    for number, plan in enumerate(plans, 1):
        filled = f"{bar(plan.memory.total_bytes / max(1, plan.memory.limit_bytes))} " if with_bar else ""
        rows.append(
            f"{number:>3} {_clip(plan.model.name, name):{name}} {_clip(_marked(plan, installed), 12):12} "
            f"{gb(plan.memory.total_bytes):>8} {filled}{_speed(plan.decode_tok_s):>9} {span(plan.ttft_s.value):>6}"
        )
    return head, rows


def table(
    answer: Recommendation,
    device: Device,
    *,
    everything: bool = False,
    installed: Installed = _NOTHING,
    listings_days: int = 0,
) -> list[str]:
    """The picks with their reasons, what nearly fits, and what to type: 25 lines at most, as many picks as they hold; with
    `everything` every model and its reason, and what else is known of the first. `installed`: ids and quants of models that
    are on this disk. `listings_days`: the age of the catalog's listings."""
    from localllm.planner import needs

    need = needs.need_of(answer.workload)
    plans = answer.plans
    at = f" with {plans[0].settings.n_ctx // 1024}k of context" if plans else ""
    lines = heading(device, f"Recommended for {need.what}{at}")
    if not plans:
        lines += ["", "  no model of the catalog fits and is fast enough; the reasons:"]
    end = [*_refused(answer, everything=everything), *_old(listings_days), *_run(plans, device, installed)]
    if everything:
        notes = [*_footnotes(plans, device, need.prompt_tokens, installed), *_bases(plans)] if plans else []
        notes += further(plans[0], "about the first:") if plans else []
        return [*lines, *_blocks(plans, installed), *(["", *notes] if notes else []), *end]
    for shown in range(len(plans), 0, -1):
        hidden = [f"    … and {len(plans) - shown} more that fit (--all)"] if shown < len(plans) else []
        notes = _footnotes(plans[:shown], device, need.prompt_tokens, installed)
        found = [*lines, *_blocks(plans[:shown], installed, short=True), *hidden, "", *notes, *end]
        if len(found) <= _MOST_LINES:
            return found
    return found if plans else [*lines, *end]


def _one_line(text: str, first: str, further: str) -> list[str]:
    """As many of the parts between semicolons as fit on one line; the first whatever it takes."""
    parts = text.split("; ")
    fitting = next((n for n in range(len(parts), 1, -1) if len(first + "; ".join(parts[:n])) <= width()), 1)
    return _wrapped("; ".join(parts[:fitting]), first, further)


def _blocks(plans: Sequence[Plan], installed: Installed, *, short: bool = False) -> list[str]:
    """The head, and each plan's row with its reason under it, in a `short` list on one line."""
    from localllm.load.candidates import image_facts

    head, rows = _rows(plans, installed)
    lines = ["", head] if plans else []
    for row, plan in zip(rows, plans, strict=True):
        say = _one_line if short else _wrapped
        lines += [row, *say(f"{_unusual(plan, plans[0])}{plan.why}", "    ", "    ")]
        if plan.memory.projector_bytes:
            size = plan.memory.projector_bytes / 1e9
            lines += _wrapped(f"images: {size:.1f} GB for the projector; {image_facts(plan.model)}", "    ", "    ")
    return lines


_CACHES = {"q8_0": "8-bit", "q8_0/q4_0": "8- and 4-bit", "q4_0": "4-bit"}


def _unusual(plan: Plan, first: Plan) -> str:
    """The plan's context where it is not the first's, and its KV cache where it is not of 16 bits, before its reason."""
    said = []
    if plan.settings.n_ctx != first.settings.n_ctx:
        said.append(f"{plan.settings.n_ctx // 1024}k of context; ")
    if plan.settings.kv_type != "f16":
        said.append(f"{_CACHES.get(plan.settings.kv_type, plan.settings.kv_type)} KV cache; ")
    return "".join(said)


def _refused(answer: Recommendation, *, everything: bool) -> list[str]:
    """What is not offered and why, what is nearest to fitting first."""
    hidden = [r for r in answer.rejected if everything or r.kind in ("memory", "speed", "context")]
    if not everything:
        hidden.sort(key=lambda r: (r.kind != "memory", r.variant.file_bytes))
    lines = ["", "Not offered:"] if hidden else []
    shown = hidden if everything else hidden[:_NEARLY_SHOWN]
    for r in shown:
        say = _wrapped if everything else _one_line
        lines += say(f"{r.model.name}: {r.reason}", "  ", "    ")
    if len(hidden) > len(shown):
        lines.append(f"  … and {len(hidden) - len(shown)} more (--all)")
    return lines


def _old(listings_days: int) -> list[str]:
    from localllm.library.catalog import OLD_DAYS

    if listings_days <= OLD_DAYS:
        return []
    text = f"the catalog's listings are {listings_days} days old; read them anew: localllm catalog update"
    return _wrapped(text, further="  ")


def _run(plans: Sequence[Plan], device: Device, installed: Installed) -> list[str]:
    """The one command that runs the first pick; nothing for a machine that one does not have."""
    if device.simulated or not plans:
        return []
    reference = f"{plans[0].model.id}:{plans[0].variant.quant}"
    here = (plans[0].model.id, plans[0].variant.quant) in installed
    return ["", f"{'' if here else f'localllm pull {reference} && '}localllm chat -m {reference}"]


def further(plan: Plan, title: str) -> list[str]:
    """The plan's further reasons under a title: how far its context goes, the other engine, drafting."""
    lines = [title] if plan.reasons else []
    for reason in plan.reasons:
        lines += _wrapped(reason, "  ", "    ")
    return lines


def _footnotes(plans: Sequence[Plan], device: Device, prompt_tokens: int, installed: Installed) -> list[str]:
    what = f"tok/s: 80 % range; wait: until the first word, for {prompt_tokens:,} tokens of prompt"
    untimed = "the processor's speed is its kind's: localllm device --measure times it"
    timed = device.simulated or device.accelerator != "cpu" or device.matrix_rates
    return [
        *_wrapped(what, further="  "),
        *_marks(plans, installed),
        *([] if timed else _wrapped(untimed, further="  ")),
    ]


def _bases(plans: Sequence[Plan]) -> list[str]:
    parts = chain.from_iterable(plan.decode_tok_s.basis.split("; ") for plan in plans)
    bases = list(dict.fromkeys(parts))
    return _wrapped("speeds from " + "; ".join(bases[:4]), further="  ")


def _usual() -> Declaration:
    """The engine whose plans are not marked."""
    return registry.running("gguf")


def _marks(plans: Sequence[Plan], installed: Installed) -> list[str]:
    """What the signs beside the quants mean, of those that are there."""
    others = " or ".join(sorted({backend_of(p.variant).label for p in plans if p.backend != _usual().name}))
    meanings = (
        ("~", "no listing shows this file: its name and size are what they would be"),
        ("*", f"runs on {others}; the others on {_usual().label}"),
        ("+", "installed"),
    )
    used = "".join(_marked(p, installed) for p in plans)
    shown = [f"{sign} {text}" for sign, text in meanings if sign in used]
    return list(chain.from_iterable(_wrapped(line, further="  ") for line in shown))


def model_table(model: Model, plans: Sequence[Plan], device: Device, *, installed: Installed = _NOTHING) -> list[str]:
    """Every variant of one model, whether it fits, and how memory grows with context."""
    lines = heading(device, f"{model.name}: every variant" if len(plans) > 1 else model.name)
    with_bar = width() >= 80
    usable = f"{'of usable':{_BAR}} " if with_bar else ""
    lines += ["", f"  {'quant':12} {'file':>8} {'memory':>9} {usable}{'fits':5} {'tok/s':>9} {'longest':>8}"]
    for plan in plans:
        filled = f"{bar(plan.memory.total_bytes / max(1, plan.memory.limit_bytes))} " if with_bar else ""
        longest = f"{plan.max_ctx // 1024}k" if plan.max_ctx >= 1024 else "none"
        lines.append(
            f"  {_clip(_marked(plan, installed), 12):12} {gb(plan.variant.file_bytes):>8} "
            f"{gb(plan.memory.total_bytes):>9} {filled}{plan.fits:5} "
            f"{_speed(plan.decode_tok_s) if plan.fits != 'no' else '–':>9} {longest:>8}"
        )
    first = plans[0]
    lines += [
        "",
        *_wrapped(
            f"memory at {first.settings.n_ctx:,} tokens of context; each further 1,024 tokens cost:", further="  "
        ),
        *(f"  {kind:9} {mb(cost):>11}" for kind, cost in _slopes(model)),
        *_wrapped("longest: the context that still fits; tok/s: 80 % range, context nearly empty", further="  "),
        *(_wrapped(f"tight: {TIGHT_MEANS}", further="  ") if any(p.fits == "tight" for p in plans) else ()),
        *_wrapped("speeds from " + first.decode_tok_s.basis, further="  "),
        *_caches(plans),
        *_wrapped(model.shape_warning, further="  "),
        *_marks(plans, installed),
    ]
    return lines


def _caches(plans: Sequence[Plan]) -> list[str]:
    """Which variants are planned with a KV cache that is not f16."""
    kinds: dict[str, list[str]] = {}
    for plan in plans:
        if plan.fits != "no" and plan.settings.kv_type != "f16":
            kinds.setdefault(plan.settings.kv_type, []).append(plan.variant.quant)
    lines: list[str] = []
    for kind, quants in kinds.items():
        lines += _wrapped(f"with a {kind} KV cache: {', '.join(quants)}", further="  ")
    return lines


def _slopes(model: Model) -> list[tuple[str, int]]:
    from localllm.planner import kv_sizes

    kinds = ("f16", "q8_0", "q4_0")
    return [(k, kv_sizes.kv_bytes_per_1k_tokens(model, k)) for k in kinds if kv_sizes.kv_type_allowed(model, k)]


def json_text(answer: Recommendation, device: Device) -> str:
    """The published JSON of an answer: keys sorted as in the schema, identical for identical inputs."""
    from localllm.device.types import device_to_json
    from localllm.planner.serialise import recommendation_to_json

    return ascii_json(recommendation_to_json(answer, device_to_json(device)))


def comparison(
    devices: Sequence[Device],
    answers: Sequence[Recommendation],
    *,
    as_json: bool,
    elsewhere: Callable[[int, Model], Plan | None] = lambda _number, _model: None,
) -> list[str]:
    """Machines side by side: each one's best plans, and what is picked on any of them on all of them. `elsewhere`: the plan of a
    model on the machine of that number, where it is not among its picks."""
    if as_json:
        from localllm.device.types import device_to_json
        from localllm.planner.serialise import recommendation_to_json

        both = [recommendation_to_json(a, device_to_json(d)) for d, a in zip(devices, answers, strict=True)]
        return [ascii_json({"machines": both})]
    lines: list[str] = []
    for device, answer in zip(devices, answers, strict=True):
        head, rows = _rows(answer.plans[:_COMPARED], _NOTHING)
        lines += [*heading(device, "Best"), head, *rows, ""]
    rows_of = _rates_on_all(answers, elsewhere)
    if not rows_of:
        return lines
    names = " / ".join(d.name for d in devices)
    lines += _wrapped(f"tok/s of each on all, in the best format there: {names}", further="  ")
    for name, row in rows_of.items():
        lines.append(f"  {_clip(name, 30):30} " + "  ".join(f"{cell:>6}" for cell in row))
    if any("–" in row for row in rows_of.values()):
        lines.append("  –: too large for it, or too slow for the purpose")
    return lines


def _rates_on_all(
    answers: Sequence[Recommendation], elsewhere: Callable[[int, Model], Plan | None]
) -> dict[str, list[str]]:
    """Tokens per second of each machine's best models on every machine, by the models' names."""
    best = chain.from_iterable(answer.plans[:_COMPARED] for answer in answers)
    models = {plan.model.id: plan.model for plan in best}
    rows: dict[str, list[str]] = {}
    for model in models.values():
        row = rows[model.name] = []
        for i, answer in enumerate(answers):
            picked = next((p for p in answer.plans if p.model.id == model.id), None)
            plan = picked or elsewhere(i, model)
            row.append(rate(plan.decode_tok_s.value) if plan else "–")
    return rows


_REACH_SHOWN = 24


def reach(model: Model, tok_s: float, found: Reach, *, as_json: bool) -> list[str]:
    """The machines that run a model at a speed, slowest memory first, and the one that nearly does."""
    if as_json:
        machines = [
            {"device": d.name, "quant": p.variant.quant, "backend": p.backend, "fits": p.fits,
             "decode_tok_s": round(p.decode_tok_s.value, 1), "memory_bytes": p.memory.total_bytes}
            for d, p in found.found
        ]  # fmt: skip
        return [ascii_json({"model": model.id, "at_tok_s": tok_s, "machines": machines})]
    lines = _wrapped(
        f"{model.name} at {rate(tok_s)} tok/s or more, each part in its smallest memory size", further="  "
    )
    if not found.found:
        lines.append("  no machine of the table reaches that")
    else:
        name = min(max(len(d.name) for d, _ in found.found), width() - 42)
        lines.append(f"  {'machine':{name}} {'GB/s':>6} {'quant':12} {'memory':>9} {'tok/s':>9}")
        for device, plan in found.found[:_REACH_SHOWN]:
            gbps = device.bandwidth_gbps.value if device.bandwidth_gbps else 0.0
            lines.append(
                f"  {_clip(device.name, name):{name}} {gbps:>6,.0f} {_clip(_marked(plan, _NOTHING), 12):12} "
                f"{gb(plan.memory.total_bytes):>9} {_speed(plan.decode_tok_s):>9}"
            )
        if len(found.found) > _REACH_SHOWN:
            lines.append(f"  … and {len(found.found) - _REACH_SHOWN} with faster memory (--json lists all)")
    if found.nearest is not None:
        device, plan = found.nearest
        text = (
            f"the fastest that holds it and does not: {device.name}, {_short_of(plan.decode_tok_s.value, tok_s)} tok/s"
        )
        lines += _wrapped(f"{text} ({plan.variant.quant})", further="  ")
    return lines


def _short_of(value: float, asked: float) -> str:
    """A speed below the one asked for, so that it reads as below: 29.7, where 30 was asked for."""
    return rate(value) if float(rate(value)) < asked else f"{value:.1f}" if value < asked - 0.05 else f"{value:.2f}"


def check(device: Device, catalog: Catalog, *, as_json: bool) -> list[str]:
    """Predicted beside measured for every run this machine remembers, and what may be wrong where reality is slower."""
    from localllm.load import measurements
    from localllm.planner import verify

    records = [r for r in measurements.load() if r.machine == device.name]
    results = []
    for r in records:
        known = measurements.for_planner([r], device.name, catalog.by_id)
        if known:
            others = measurements.for_planner([o for o in records if o != r], device.name, catalog.by_id)
            results.append(
                verify.compare(
                    device,
                    known[0],
                    others,
                    memory_bytes=r.memory_bytes,
                    predicted_memory_bytes=r.predicted_memory_bytes,
                )
            )
    if as_json:
        return [ascii_json({"runs": [verify.to_json(x) for x in results]})]
    if not results:
        return [f"nothing has been measured on {device.name} yet: run `localllm bench`"]
    lines = [f"Predicted beside measured on {device.name}", ""]
    name = min(max(len(x.name) for x in results), width() - 51)
    lines.append(f"  {'model':{name}} {'quant':8} {'memory':>17} {'decode tok/s':>21}")
    for x in results:
        lines.append(
            f"  {_clip(x.name, name):{name}} {_clip(x.quant, 8):8} {_pair(x.memory):>17} {_pair_rate(x.decode):>21}"
        )
        for cause in x.causes:
            lines += _wrapped(cause, "      ", "      ")
    return lines


def _pair(value: tuple[float, float] | None) -> str:
    return "–" if value is None else f"{gb(value[0])} / {gb(value[1])}"


def _pair_rate(value: tuple[float, float]) -> str:
    predicted, measured = value
    return f"{rate(predicted)} / {rate(measured)} ({measured / predicted - 1:+.0%})"
