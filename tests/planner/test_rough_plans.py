"""A short answer completes only the plans that it shows. They equal those of a detailed answer."""

from __future__ import annotations

import pytest

from localllm.device.name_lookup import resolve
from localllm.planner.recommend import recommend
from localllm.planner.types import Plan, Workload
from localllm_catalog import catalog

MODELS = catalog.load().models


def without_details(plan: Plan) -> Plan:
    return plan._replace(reasons=(), max_ctx=0)


@pytest.mark.parametrize("machine", ["Strix Halo", "2x RTX 3090", "RTX 4060 + 32GB RAM"])
def test_plans_without_details_equal_those_with_details(machine: str) -> None:
    device = resolve(machine)
    for workload in (Workload(), Workload("coding")):
        short = recommend(device, MODELS, workload, detailed=False)
        detailed = recommend(device, MODELS, workload)
        assert [*map(without_details, short.plans)] == [*map(without_details, detailed.plans)]
        assert [r.model for r in short.rejected] == [r.model for r in detailed.rejected]
