"""How one machine's answer looks: tables of models, or JSON. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from localllm.cli.recommend.page import BAR, bar, clip, speed, width, wrapped
from localllm.device.types import Device, device_to_json
from localllm.formatting import gb, mb, span
from localllm.library.catalog import OLD_DAYS
from localllm.load.candidates import image_facts
from localllm.memory.verdict import TIGHT_MEANS
from localllm.plain_output import ascii_json
from localllm.planner import kv_sizes, needs
from localllm.planner.serialise import recommendation_to_json
from localllm.planner.types import Plan, Recommendation, backend_of
from localllm_backends import registry
from localllm_backends.declaration import Declaration
from localllm_catalog.types import Model

# What says a figure that is assumed, or a processor that is this machine's.
ASSUMED_FIXES = ("--bandwidth GBPS", "localllm device --measure", "--device NAME")
# What a row takes beside the model's name, and with the bar; a name shorter than this costs the bar
# its place.
_ROW_COLUMNS = 43
_LEAST_NAME = 20
_NEARLY_SHOWN = 2
# A plain list is read at one glance.
_MOST_LINES = 25


def heading(device: Device, what: str) -> list[str]:
    """What is shown, and what the machine offers with how that is known."""
    known = device.bandwidth_gbps
    bandwidth = f"{known.value:,.0f} GB/s ({known.basis})"
    memory = device.memory
    free = ""
    if memory.available_bytes < device.room_bytes:
        free = f", {gb(memory.available_bytes)} free now"
    beside = ""
    if device.kind == "discrete" and device.host is not None:
        rate_of_host = device.host_bandwidth_gbps
        at = ""
        if rate_of_host:
            at = f" at {rate_of_host.value:,.0f} GB/s ({rate_of_host.basis})"
        beside = f"; beside it {gb(device.host.limit_bytes)} of system memory{at}"
    usable = (
        f"{gb(device.room_bytes)} usable of {memory.total_bytes / 1e9:.1f}{free}; "
        f"{bandwidth}{beside}"
    )
    return [
        *wrapped(
            f"{what} on {device.name}{' (simulated)' if device.simulated else ''}", further="  "
        ),
        *wrapped(usable, further="  "),
        *chain.from_iterable(
            wrapped(f"{finding.message}; else: {finding.fix}", further="  ")
            for finding in device.findings
            if finding.fix in ASSUMED_FIXES
        ),
        *chain.from_iterable(wrapped(account, further="  ") for account in device.accounts),
    ]


Installed = frozenset[tuple[str, str]]
NOTHING: Installed = frozenset()


def marked(plan: Plan, installed: Installed) -> str:
    """The quant with what the footnotes explain: ~ constructed, * another engine, + on this
    disk."""
    here = (plan.model.id, plan.variant.quant) in installed
    made = "~" if plan.variant.is_estimate and not here else ""
    return f"{made}{plan.variant.quant}{'*' if plan.backend != _usual().name else ''}{'+' if here else ''}"


def numbered_rows(plans: Sequence[Plan], installed: Installed) -> tuple[str, list[str]]:
    """The head and a row for each plan; narrow terminals lose the bar, wide ones show names
    whole."""
    room = width() - _ROW_COLUMNS
    with_bar = room - BAR - 1 >= _LEAST_NAME
    name = min(
        max([_LEAST_NAME, *(len(p.model.name) for p in plans)]), room - (BAR + 1 if with_bar else 0)
    )
    usable = f"{'of usable':{BAR}} " if with_bar else ""
    head = f"    {'model':{name}} {'quant':12} {'memory':>8} {usable}{'tok/s':>9} {'wait':>6}"
    rows = []
    for number, plan in enumerate(plans, 1):
        filled = ""
        if with_bar:
            filled = f"{bar(plan.memory.total_bytes / max(1, plan.memory.limit_bytes))} "
        rows.append(
            f"{number:>3} "
            f"{clip(plan.model.name, name):{name}} {clip(marked(plan, installed), 12):12} "
            f"{gb(plan.memory.total_bytes):>8} {filled}{speed(plan.decode_tok_s):>9} "
            f"{span(plan.ttft_s.value):>6}"
        )
    return head, rows


def table(
    answer: Recommendation,
    device: Device,
    *,
    everything: bool = False,
    installed: Installed = NOTHING,
    listings_days: int = 0,
) -> list[str]:
    """The picks with their reasons, what nearly fits, and what to type: 25 lines at most, as many
    picks as they hold; with `everything` every model and its reason, and what else is known of the
    first.
    `installed`: ids and quants of models that are on this disk.
    `listings_days`: the age of the catalog's listings."""
    need = needs.need_of(answer.workload)
    plans = answer.plans
    at = ""
    if plans:
        at = f" with {plans[0].settings.n_ctx // 1024}k of context"
    lines = heading(device, f"Recommended for {need.what}{at}")
    if not plans:
        lines += ["", "  no model of the catalog fits and is fast enough; the reasons:"]
    age = f"the catalog's listings are {listings_days} days old"
    old = wrapped(f"{age}; read them anew: localllm catalog update", further="  ")
    end = [
        *_refused(answer, everything=everything),
        *(old if listings_days > OLD_DAYS else []),
        *_run(plans, device, installed),
    ]
    if everything:
        notes = []
        if plans:
            notes += _footnotes(plans, device, need.prompt_tokens, installed)
            notes += _bases(plans)
            notes += further(plans[0], "about the first:")
        return [*lines, *_blocks(plans, installed), *(["", *notes] if notes else []), *end]
    for shown in range(len(plans), 0, -1):
        hidden = []
        if shown < len(plans):
            hidden = [f"    … and {len(plans) - shown} more that fit (--all)"]
        notes = _footnotes(plans[:shown], device, need.prompt_tokens, installed)
        found = [*lines, *_blocks(plans[:shown], installed, short=True), *hidden, "", *notes, *end]
        if len(found) <= _MOST_LINES:
            return found
    if plans:
        return found
    return [*lines, *end]


def _one_line(text: str, first: str, further: str) -> list[str]:
    """As many of the parts between semicolons as fit on one line; the first whatever it takes."""
    parts = text.split("; ")
    fitting = next(
        (n for n in range(len(parts), 1, -1) if len(first + "; ".join(parts[:n])) <= width()), 1
    )
    return wrapped("; ".join(parts[:fitting]), first, further)


def _blocks(plans: Sequence[Plan], installed: Installed, *, short: bool = False) -> list[str]:
    """The head, and each plan's row with its reason under it, in a `short` list on one line."""

    head, rows = numbered_rows(plans, installed)
    lines = ["", head] if plans else []
    for row, plan in zip(rows, plans, strict=True):
        say = _one_line if short else wrapped
        lines += [row, *say(f"{_unusual(plan, plans[0])}{plan.why}", "    ", "    ")]
        if plan.memory.projector_bytes:
            size = plan.memory.projector_bytes / 1e9
            lines += wrapped(
                f"images: {size:.1f} GB for the projector; {image_facts(plan.model)}",
                "    ",
                "    ",
            )
    return lines


_CACHES = {"q8_0": "8-bit", "q8_0/q4_0": "8- and 4-bit", "q4_0": "4-bit"}


def _unusual(plan: Plan, first: Plan) -> str:
    """The plan's context where it is not the first's, and its KV cache where it is not of 16 bits,
    before its reason."""
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
        say = wrapped if everything else _one_line
        lines += say(f"{r.model.name}: {r.reason}", "  ", "    ")
    if len(hidden) > len(shown):
        lines.append(f"  … and {len(hidden) - len(shown)} more (--all)")
    return lines


def _run(plans: Sequence[Plan], device: Device, installed: Installed) -> list[str]:
    """The one command that runs the first pick; nothing for a machine that one does not have."""
    if device.simulated or not plans:
        return []
    reference = f"{plans[0].model.id}:{plans[0].variant.quant}"
    here = (plans[0].model.id, plans[0].variant.quant) in installed
    return ["", f"{'' if here else f'localllm pull {reference} && '}localllm chat -m {reference}"]


def further(plan: Plan, title: str) -> list[str]:
    """The plan's further reasons under a title: how far its context goes, the other engine,
    drafting."""
    lines = [title] if plan.reasons else []
    for reason in plan.reasons:
        lines += wrapped(reason, "  ", "    ")
    return lines


def _footnotes(
    plans: Sequence[Plan], device: Device, prompt_tokens: int, installed: Installed
) -> list[str]:
    what = f"tok/s: 80 % range; wait: until the first word, for {prompt_tokens:,} tokens of prompt"
    untimed = "the processor's speed is its kind's: localllm device --measure times it"
    timed = device.simulated or device.accelerator != "cpu" or device.matrix_rates
    return [
        *wrapped(what, further="  "),
        *_marks(plans, installed),
        *([] if timed else wrapped(untimed, further="  ")),
    ]


def _bases(plans: Sequence[Plan]) -> list[str]:
    parts = chain.from_iterable(plan.decode_tok_s.basis.split("; ") for plan in plans)
    bases = list(dict.fromkeys(parts))
    return wrapped("speeds from " + "; ".join(bases[:4]), further="  ")


def _usual() -> Declaration:
    """The engine whose plans are not marked."""
    return registry.running("gguf")


def _marks(plans: Sequence[Plan], installed: Installed) -> list[str]:
    """What the signs beside the quants mean, of those that are there."""
    others = " or ".join(
        sorted({backend_of(p.variant).label for p in plans if p.backend != _usual().name})
    )
    meanings = (
        ("~", "no listing shows this file: its name and size are what they would be"),
        ("*", f"runs on {others}; the others on {_usual().label}"),
        ("+", "installed"),
    )
    used = "".join(marked(p, installed) for p in plans)
    shown = [f"{sign} {text}" for sign, text in meanings if sign in used]
    return list(chain.from_iterable(wrapped(line, further="  ") for line in shown))


def model_table(
    model: Model, plans: Sequence[Plan], device: Device, *, installed: Installed = NOTHING
) -> list[str]:
    """Every variant of one model, whether it fits, and how memory grows with context."""
    lines = heading(device, f"{model.name}: every variant" if len(plans) > 1 else model.name)
    with_bar = width() >= 80
    usable = f"{'of usable':{BAR}} " if with_bar else ""
    lines += [
        "",
        f"  {'quant':12} {'file':>8} {'memory':>9} {usable}{'fits':5} {'tok/s':>9} {'longest':>8}",
    ]
    for plan in plans:
        filled = ""
        if with_bar:
            filled = f"{bar(plan.memory.total_bytes / max(1, plan.memory.limit_bytes))} "
        longest = "none"
        if plan.max_ctx >= 1024:
            longest = f"{plan.max_ctx // 1024}k"
        lines.append(
            f"  {clip(marked(plan, installed), 12):12} {gb(plan.variant.file_bytes):>8} "
            f"{gb(plan.memory.total_bytes):>9} {filled}{plan.fits:5} "
            f"{speed(plan.decode_tok_s) if plan.fits != 'no' else '–':>9} {longest:>8}"
        )
    first = plans[0]
    lines += [
        "",
        *wrapped(
            f"memory at {first.settings.n_ctx:,} tokens of context; each further 1,024 tokens "
            "cost:",
            further="  ",
        ),
        *(f"  {kind:9} {mb(cost):>11}" for kind, cost in _slopes(model)),
        *wrapped(
            "longest: the context that still fits; tok/s: 80 % range, context nearly empty",
            further="  ",
        ),
        *(
            wrapped(f"tight: {TIGHT_MEANS}", further="  ")
            if any(p.fits == "tight" for p in plans)
            else ()
        ),
        *wrapped("speeds from " + first.decode_tok_s.basis, further="  "),
        *(
            wrapped(first.why, further="  ")
            if 0 < model.native_context < first.settings.n_ctx
            else ()
        ),
        *_caches(plans),
        *wrapped(model.shape_warning, further="  "),
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
        lines += wrapped(f"with a {kind} KV cache: {', '.join(quants)}", further="  ")
    return lines


def _slopes(model: Model) -> list[tuple[str, int]]:
    kinds = ("f16", "q8_0", "q4_0")
    return [
        (k, kv_sizes.kv_bytes_per_1k_tokens(model, k))
        for k in kinds
        if kv_sizes.kv_type_allowed(model, k)
    ]


def json_text(answer: Recommendation, device: Device) -> str:
    """The published JSON of an answer: keys sorted as in the schema, identical for identical
    inputs."""
    return ascii_json(recommendation_to_json(answer, device_to_json(device)))
