"""Speeds measured by others.

`catalog update` reads them from a file of rows, and plans for the same machine and file use
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from library.hub import Hub
from localllm import paths
from localllm.cli.commands import catalog as command
from localllm.device.name_lookup import resolve
from localllm.errors import DownloadError, UsageError
from localllm.library.catalog import load_catalog
from localllm.load import measured_by_others
from localllm.load.candidates import overrides_for
from localllm.planner import speed
from localllm.planner.types import Range
from localllm_catalog.types import Model, Variant

app = typer.Typer()
app.add_typer(command.app, name="catalog")

MACHINE = "M4 Max 128GB"
MODEL = "qwen3-8b"
DEPTH = 544


def file_of_model() -> tuple[Model, Variant]:
    model = load_catalog().by_id[MODEL]
    return model, next(v for v in model.variants if v.quant == "Q4_K_M")


def row(source: str, tok_s: float, **changed: Any) -> dict[str, Any]:
    """Return the row that `bench --share` prints for the model, with its source."""
    _, variant = file_of_model()
    device = resolve(MACHINE)
    made = {
        "source": source,
        "device": "Apple M4 Max",
        "match": device.match,
        "device_memory_bytes": device.memory.total_bytes,
        "model": MODEL,
        "quant": variant.quant,
        "backend": "llamacpp",
        "file_bytes": variant.file_bytes,
        "decode_tok_s": tok_s,
        "depth": DEPTH,
        "prefill_tok_s": 300.0,
        "prompt_tokens": 512,
    }
    return {**made, **changed}


def update(tmp_path: Path, rows: list[Any], *more: str) -> Any:
    """Run the command on a file of these rows, with a hub that has no repository."""
    file = tmp_path / "rows.jsonl"
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    wanted = ["catalog", "update", MODEL, "--measured-rows", str(file), *more]
    return CliRunner().invoke(app, wanted)


def decode(machine: str = MACHINE) -> Range:
    device = resolve(machine)
    found = overrides_for(device, load_catalog())
    return speed.decode(device, *file_of_model(), depth=DEPTH, measured=found.measured)


@pytest.fixture(autouse=True)
def no_repositories(hub: Hub) -> Hub:
    return hub


def test_each_source_weighs_as_much_as_the_prediction(tmp_path: Path) -> None:
    before = decode()
    fast = 1.2 * before.value
    assert update(tmp_path, [row("issue 1", fast)]).exit_code == 0
    one = decode()
    assert one.value == pytest.approx(1.2**0.5 * before.value)
    many = [row("issue 1", fast) for _ in range(50)]
    assert update(tmp_path, [*many, row("issue 2", before.value)]).exit_code == 0
    two = decode()
    assert two.value == pytest.approx(1.2 ** (0.5 * 2 / 3) * before.value)
    assert update(tmp_path, [row(f"issue {n}", fast) for n in range(3)]).exit_code == 0
    three = decode()
    assert three.value == pytest.approx(1.2**0.75 * before.value)
    widths = [found.high / found.low for found in (before, one, three)]
    assert widths == sorted(widths, reverse=True)
    assert three.basis == f"measured by others: {fast:.3g} (3 sources)"


def test_a_prefill_speed_measured_by_others_changes_the_prediction(tmp_path: Path) -> None:
    device = resolve(MACHINE)
    before = speed.prefill(device, *file_of_model(), prompt_tokens=512)
    assert update(tmp_path, [row("issue 1", 30.0)]).exit_code == 0
    measured = overrides_for(device, load_catalog()).measured
    after = speed.prefill(device, *file_of_model(), prompt_tokens=512, measured=measured)
    assert after.value == pytest.approx((before.value * 300) ** 0.5)
    assert after.basis == "measured by others: 300 (1 source)"
    assert update(tmp_path, [row("issue 1", 30.0, prefill_tok_s=9e6)]).exit_code == 0
    measured = overrides_for(device, load_catalog()).measured
    unchanged = speed.prefill(device, *file_of_model(), prompt_tokens=512, measured=measured)
    assert unchanged == before


@pytest.mark.parametrize(
    "changed",
    [
        {"match": "M4 Pro 24GB"},
        {"device_memory_bytes": 64 * 2**30},
        {"model": "qwen3-14b"},
        {"quant": "Q8_0"},
        {"file_bytes": 3_000_000_000},
        {"backend": "mlx"},
        {"kv_type": "q9_9"},
        {"quant": "Q4_K_M\n"},
        {"decode_tok_s": 2000.0},
        {"short_tok_s": 2000.0, "short_depth": 40},
        {"decode_tok_s": 0.5},
    ],
    ids=lambda changed: ",".join(changed),
)
def test_another_machine_or_file_and_impossible_speeds_change_no_plan(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    before = decode()
    assert update(tmp_path, [row("issue 1", 30.0, **changed)]).exit_code == 0
    assert decode() == before


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 200,
        "7",
        {},
        row("", 30.0),
        row("issue 1", float("inf")),
        row("issue 1", float("nan")),
        row("issue 1", -1.0),
        row("issue 1", 30.0, depth=-1),
        row("issue 1", 30.0, file_bytes=0),
        row("issue 1", 1e-300),
        row("issue 1", 30.0, depth=10**400),
        row("issue 1", 30.0, file_bytes=10**400),
        row("issue 1", 30.0, device_memory_bytes=10**400),
        row("issue 1", 30.0, prompt_tokens=10**300),
        row("issue 1", 30.0, experts_on_host=-5),
        row("issue 1", 30.0, quant=7),
        row("issue 1", 30.0, backend="no-engine"),
        row("x" * 5000, 30.0),
    ],
    ids=lambda line: str(line)[-60:],
)
def test_lines_without_a_valid_measurement_are_left_out(tmp_path: Path, line: Any) -> None:
    done = update(tmp_path, [line, row("issue 2", 30.0)])
    assert done.exit_code == 0, done.output
    assert "speeds measured by others: 1 (sources: 1)" in done.output
    assert "left out: 1 lines" in done.output
    assert [found.source for found in measured_by_others.read(resolve(MACHINE))] == ["issue 2"]


def test_a_file_without_rows_or_without_encryption_is_refused(tmp_path: Path) -> None:
    refused = update(tmp_path, ["{}"]).exception
    assert isinstance(refused, UsageError)
    assert "has no row of a measurement" in str(refused)
    for place, error in (
        ("http://example.org/rows.jsonl", UsageError),
        (str(tmp_path / "missing"), UsageError),
        ("http://127.0.0.1:9/rows.jsonl", DownloadError),
    ):
        wanted = ["catalog", "update", MODEL, "--measured-rows", place]
        assert isinstance(CliRunner().invoke(app, wanted).exception, error), place


@pytest.mark.parametrize("text", ["", "[", "7", '{"rows": 7}', '{"rows": [7, {}, null]}'])
def test_a_damaged_file_changes_no_plan(text: str) -> None:
    before = decode()
    paths.private_dir(paths.data_dir())
    paths.write_private(paths.shared_rows_file(), text)
    assert decode() == before


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    before = decode()
    assert update(tmp_path, [row("issue 1", 30.0)], "--dry-run").exit_code == 0
    assert not paths.shared_rows_file().exists()
    assert decode() == before
