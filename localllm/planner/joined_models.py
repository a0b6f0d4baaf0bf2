"""Find the models that joined machines hold only together. Pure.

Layers on several machines are computed one after another (localllm/planner/cluster.py), so a model
that one machine holds decodes no faster on two. Machines are worth joining for models that are too
large for each of them, and for better files of smaller models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from localllm.device.types import Device
from localllm.planner import cluster, quality, scoring
from localllm.planner.cluster import ClusterPlan, Link
from localllm.planner.recommend import recommend
from localllm.planner.starting_settings import context_for
from localllm.planner.types import Plan, RunSettings, Workload
from localllm_catalog.types import Model, Variant

# A better file that gains less than this is not worth a second machine.
_MIN_GAIN_POINTS = 1.0
# Files that lose more to their format than this are not listed: a smaller model does better.
_MAX_LOST_POINTS = 3.0


@dataclass(frozen=True, slots=True)
class JoinedPick:
    """A model's best file on the machines together.

    - `points`: its rating less the cost of its format.
    - `score`: `points` with the gain or loss by its speed. Picks are ranked by it.
    - `alone`: the best file that one of the machines holds, or None.
    - `gained_points`: the points that `variant` has more than `alone`.
    """

    model: Model
    variant: Variant
    plan: ClusterPlan
    points: float
    score: float
    alone: Variant | None
    gained_points: float


def models_for(
    devices: Sequence[Device], models: Iterable[Model], workload: Workload, link: Link
) -> list[JoinedPick]:
    """Return the models that are worth joining `devices` by `link`, best first.

    Models below the least speed of the purpose are left out.
    """
    need = scoring.need_of(workload)
    picks = []
    for model in models:
        if scoring.unsuited(model, workload) is not None:
            continue
        pick = _best_pick(devices, model, workload, link)
        if pick is not None and pick.plan.decode_tok_s.value >= need.least_tok_s:
            picks.append(pick)
    return sorted(picks, key=attrgetter("score"), reverse=True)


def best_alone(
    devices: Iterable[Device], models: Sequence[Model], workload: Workload
) -> Plan | None:
    """Return the best of the first picks of each machine by itself; None if no model fits one."""
    first_picks: list[Plan] = []
    for device in dict.fromkeys(devices):
        first_picks += recommend(device, models, workload, limit=1).plans
    return max(first_picks, key=attrgetter("score"), default=None)


def _best_pick(
    devices: Sequence[Device], model: Model, workload: Workload, link: Link
) -> JoinedPick | None:
    """Return the best file of `model` on all `devices`; None if no file fits, or if one
    machine holds a file as good."""
    settings = RunSettings(n_ctx=context_for(model, workload), slots=workload.parallel)
    joint_file = _best_file(devices, model, settings)
    if joint_file is None:
        return None
    rating = quality.rate(model, workload.purpose).points
    points = rating - quality.format_cost(model, joint_file)
    best_single_file = None
    gained_points = rating
    for device in dict.fromkeys(devices):
        single_file = _best_file([device], model, settings)
        if single_file is not None:
            gained_now = quality.format_cost(model, single_file) - quality.format_cost(
                model, joint_file
            )
            if gained_now < gained_points:
                best_single_file = single_file
                gained_points = gained_now
    if gained_points < _MIN_GAIN_POINTS:
        return None
    plan = cluster.plan(model, joint_file, settings, devices, link)
    if plan is None:
        return None
    need = scoring.need_of(workload)
    tok_s = plan.decode_tok_s.value
    score = points + scoring.speed_points(tok_s, need) - scoring.thinking_lost(model, tok_s, need)
    return JoinedPick(model, joint_file, plan, points, score, best_single_file, gained_points)


def _best_file(devices: Sequence[Device], model: Model, settings: RunSettings) -> Variant | None:
    """Return the file of `model` that loses least to its format, among those that `devices` hold.

    Of equal ones this is the smallest. llama.cpp's RPC reads single files only.
    """
    usable_bytes = sum(device.usable_bytes for device in devices)
    files = [
        (quality.format_cost(model, variant), variant.file_bytes, variant)
        for variant in model.variants
        if not variant.is_folder and 0 < variant.file_bytes <= usable_bytes
    ]
    for cost, _, variant in sorted(files, key=lambda file: file[:2]):
        if cost > _MAX_LOST_POINTS:
            break
        if cluster.divide(model, variant, settings, devices) is not None:
            return variant
    return None
