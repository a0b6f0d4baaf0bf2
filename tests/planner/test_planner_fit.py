"""The fit behind efficiency.toml: one odd machine must not drag the prediction for its kin."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from benchmarks import planner_fit


def _rows(device: str, slowdown: float) -> list[planner_fit.Row]:
    """Four dense models on one simulated part whose true efficiency is 0.8 / slowdown."""
    keys = ("cuda", "nvidia-ada.cuda", f"part:{device}.cuda")
    return [
        planner_fit.Row(
            device, "cuda", f"model-{ms}", "Q8_0", False, 0, slowdown * ms / 0.8 / 1e3, keys,
            ((ms / 1e3, (("eta", -1),)), (0.0, (("eta", -1),))),
        )
        for ms in (2, 5, 10, 20)
    ]  # fmt: skip


def _unseen_error(monkeypatch: pytest.MonkeyPatch, freedom: float | None) -> float:
    monkeypatch.setitem(planner_fit.PART_FREEDOM, "decode", freedom)
    seen = [row for i in range(3) for row in _rows(f"RTX 40{i}0", 1.0)] + _rows("RTX 4090", 3.0)
    fit = planner_fit.Fit("decode", seen)
    return abs(fit.error(_rows("RTX 4060", 1.0)[0]))


def test_one_odd_machine_moves_its_kin_less_under_the_heavy_tailed_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three machines agree and one is three times slower: the fourth of the kind is predicted like the three."""
    shipped = planner_fit.PART_FREEDOM["decode"]
    normal = _unseen_error(monkeypatch, None)
    robust = _unseen_error(monkeypatch, shipped)
    assert robust < 0.5 * normal
    assert robust < 0.08


@pytest.mark.parametrize("split", [planner_fit.by_device, planner_fit.by_device_in_family])
def test_splits_by_device_never_share_a_device(split: planner_fit.Split) -> None:
    """What is predicted comes from machines the fit has not seen, and every row is in exactly one half."""
    rows = [row for name in ("RTX 4090", "RTX 4080", "RTX 3090", "RTX 3080", "Apple M1") for row in _rows(name, 1.0)]
    for seed in range(5):
        one, two = split(rows, seed)
        assert not {r.device for r in one} & {r.device for r in two}
        assert len(one) + len(two) == len(rows)


def test_within_families_both_halves_see_every_family_of_two() -> None:
    """Two Ada cards and two Ampere cards: each half gets one of each."""
    rows = [row for name in ("RTX 4090", "RTX 4080", "RTX 3090", "RTX 3080") for row in _rows(name, 1.0)]
    for half in planner_fit.by_device_in_family(rows, 1):
        assert {planner_fit.family(r.device) for r in half} == {"nvidia ada", "nvidia ampere"}
