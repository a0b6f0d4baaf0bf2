"""`localllm catalog update`: the hub's values replace constructed ones, after they were checked."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from library.hub import Hub, Repo
from localllm.cli.commands import catalog as command
from localllm.cli.recommend.view import table
from localllm.device.name_lookup import resolve
from localllm.errors import DownloadError, UsageError
from localllm.library import catalog_update
from localllm.library.catalog import (
    OLD_DAYS,
    SHIPPED,
    UPDATE_FILE,
    age_days,
    load_catalog,
    user_folder,
)
from localllm.library.hub import HubUnreachableError, Patience, list_files
from localllm.planner import kv_sizes
from localllm.planner.recommend import recommend
from localllm.planner.types import RunSettings, Workload
from localllm_catalog import catalog, from_gguf, gguf
from models import tiny_gguf

# One of its files is listed, the others are constructed.
MODEL = "nemotron-3.5-lightning-30b-a3b"
NAME = "NVIDIA-Nemotron-3.5-Lightning-30B-A3B"
REPO = f"unsloth/{NAME}-GGUF"
GB = 10**9

app = typer.Typer()
app.add_typer(command.app, name="catalog")


class Large(Repo):
    """A repository of a few bytes that states the sizes of real files."""

    sizes: dict[str, int]

    def siblings(self) -> list[dict[str, Any]]:
        """Return the files as the API lists them, with the stated sizes."""
        rows = super().siblings()
        for row in rows:
            row["size"] = self.sizes[row["rfilename"]]
            row["lfs"] = {"sha256": "a" * 64, "size": row["size"], "pointerSize": 135}
        return rows


def large(name: str, sizes: dict[str, int]) -> Large:
    """Return a repository of these files."""
    found = Large(name, {file: file.encode() for file in sizes})
    found.sizes = sizes
    return found


@pytest.fixture
def stocked(hub: Hub) -> Hub:
    """Return a hub with the model's GGUF files, including a draft head, and no MLX folders."""
    sizes = {
        f"{NAME}-Q4_K_M.gguf": 23_600_000_000,
        f"{NAME}-UD-Q4_K_XL.gguf": 25_500_000_000,
        f"BF16/{NAME}-BF16-00001-of-00002.gguf": 40 * GB,
        f"BF16/{NAME}-BF16-00002-of-00002.gguf": 14 * GB,
        f"mtp-{NAME}-Q8_0.gguf": 500_000_000,
        "mmproj-F16.gguf": 900_000_000,
    }
    hub.repos[REPO] = large(REPO, sizes)
    return hub


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["catalog", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_hubs_listing_replaces_estimated_variants(stocked: Hub) -> None:
    before = {v.quant: v for v in load_catalog().by_id[MODEL].variants}
    assert before["Q4_K_M"].is_estimate
    said = run("update", MODEL)
    assert "Q4_K_M is published: 23.6 GB" in said
    assert "new: BF16 (54.0 GB)" in said
    assert f"removed: Q6_K in {REPO}" in said
    after = {(v.repo, v.quant): v for v in load_catalog().by_id[MODEL].variants}
    q4 = after[REPO, "Q4_K_M"]
    assert (q4.file_bytes, q4.exact, q4.is_estimate) == (23_600_000_000, True, False)
    assert q4.files == (f"{NAME}-Q4_K_M.gguf",)
    assert len(after[REPO, "BF16"].files) == 2
    assert q4.mmproj_file == "mmproj-F16.gguf"
    assert (REPO, "Q8_0") not in after  # 500 MB are too few for a 30B model
    assert "nothing changed" in run("update", MODEL)


def test_a_dry_run_writes_nothing_and_other_models_stay(stocked: Hub) -> None:
    run("update", MODEL, "--dry-run")
    assert not (user_folder() / UPDATE_FILE).exists()
    others = {m.id: m.variants for m in load_catalog().models if m.id != MODEL}
    run("update", MODEL)
    assert {m.id: m.variants for m in load_catalog().models if m.id != MODEL} == others


def test_a_repository_that_is_gone_keeps_its_listed_variants(hub: Hub) -> None:
    said = run("update", MODEL)
    assert f"not read: {REPO}" in said
    quants = {v.quant for v in load_catalog().by_id[MODEL].variants if v.format == "gguf"}
    assert quants == {"UD-Q4_K_XL"}


def test_a_repository_that_is_closed_to_us_stays_as_it_is(stocked: Hub) -> None:
    stocked.gated.add(REPO)
    before = [v for v in load_catalog().by_id[MODEL].variants if v.format == "gguf"]
    said = run("update", MODEL)
    assert "is gated" in said
    after = [v for v in load_catalog().by_id[MODEL].variants if v.format == "gguf"]
    assert [(v.quant, v.file_bytes, v.exact, v.files) for v in after] == [
        (v.quant, v.file_bytes, v.exact, v.files) for v in before
    ]
    assert [v.is_estimate for v in after] == [v.is_estimate for v in before]


def test_a_hub_that_is_down_changes_nothing(hub: Hub) -> None:
    hub.schedule.always = ("api", "500")
    waits: list[float] = []
    patience = Patience(listing_failures=2, sleep=waits.append)
    with pytest.raises(HubUnreachableError):
        catalog_update.read(
            [load_catalog().by_id[MODEL]], lambda repo: list_files(repo, patience=patience)
        )
    assert not (user_folder() / UPDATE_FILE).exists()


def test_a_model_that_comes_as_a_package_stays_as_it_is(hub: Hub) -> None:
    starter = "smollm2-135m-instruct"
    before = load_catalog().by_id[starter].variants
    assert any(v.repo.startswith("pypi:") for v in before)
    assert "not read" in run("update", starter)
    after = load_catalog().by_id[starter].variants
    kept = [(v.quant, v.file_bytes, v.files) for v in after if v.repo.startswith("pypi:")]
    assert kept == [(v.quant, v.file_bytes, v.files) for v in before if v.repo.startswith("pypi:")]


def test_an_update_is_refused_offline() -> None:
    with pytest.raises(UsageError):
        run("update", "--offline")


def test_the_age_is_that_of_the_newest_listing(tmp_path: Path) -> None:
    sources = catalog.read_sources()
    newest = max(fact["date"] for fact in sources.values())
    assert newest == SHIPPED.isoformat()
    later = SHIPPED + datetime.timedelta(days=61)
    assert age_days(tmp_path, later) == 61 > OLD_DAYS
    catalog_update.write(catalog_update.Update(), tmp_path, later - datetime.timedelta(days=1))
    assert age_days(tmp_path, later) == 1


def test_recommend_notes_that_listings_are_old() -> None:
    device = resolve("RTX 4090")
    answer = recommend(device, [load_catalog().by_id["qwen3-8b"]], Workload())
    assert "catalog update" not in "\n".join(table(answer, device, listings_days=OLD_DAYS))
    old = "\n".join(table(answer, device, listings_days=75))
    assert "75 days old" in old
    assert "localllm catalog update" in old


def test_an_unknown_model_is_added_from_the_header_of_its_file(hub: Hub, tmp_path: Path) -> None:
    file = tiny_gguf.write_hybrid(tmp_path / "model.gguf")
    hub.add("somebody/Newest-1B-GGUF", {"Newest-1B-Q8_0.gguf": file.read_bytes()})
    read = from_gguf.model_from_gguf(gguf.read(file))
    said = run("update", "somebody/Newest-1B-GGUF")
    assert "new: " in said
    assert "recurrent" in said
    added = load_catalog().by_id["newest-1b"]
    assert added.layers == read.layers
    assert (added.hidden_size, added.vocab_size, added.native_context) == (
        read.hidden_size, read.vocab_size, read.native_context,
    )  # fmt: skip
    (variant,) = added.variants
    assert (variant.quant, variant.repo, variant.file_bytes) == (
        "Q8_0", "somebody/Newest-1B-GGUF", file.stat().st_size,
    )  # fmt: skip
    assert kv_sizes.kv_bytes(added, RunSettings(512)) == kv_sizes.kv_bytes(read, RunSettings(512))
    # A later update of this or of another model keeps the values that were read.
    assert "nothing changed" in run("update", "newest-1b")
    assert load_catalog().by_id["newest-1b"].layers == read.layers


def test_experts_and_template_of_a_new_model_are_read_too(hub: Hub, tmp_path: Path) -> None:
    file = tiny_gguf.write_moe(tmp_path / "model.gguf")
    hub.add("somebody/Mixed-GGUF", {"Mixed-Q8_0.gguf": file.read_bytes()})
    read = from_gguf.model_from_gguf(gguf.read(file))
    run("update", "somebody/Mixed-GGUF")
    added = load_catalog().by_id["mixed"]
    assert added.experts == read.experts
    assert (added.calls_tools, added.reasoning_kind, added.sampling) == (
        read.calls_tools, read.reasoning_kind, read.sampling,
    )  # fmt: skip


UNREAD = (
    "{% for t in tools %}<<{{ t }}>>{% endfor %}",
    "{% if tools %}call: @@fn{% endif %}",
    "{{ tools | tojson }} call",
)


@pytest.mark.parametrize(
    "template", [*UNREAD, "{% if tools %}<tool_call>{% endif %}", "{{ messages }}"]
)
def test_a_model_without_supported_tool_calls_is_not_listed_for_coding(
    hub: Hub, tmp_path: Path, template: str
) -> None:
    file = tiny_gguf.write_llama(tmp_path / "model.gguf", template=template)
    hub.add("somebody/Calling-GGUF", {"Calling-Q8_0.gguf": file.read_bytes()})
    run("update", "somebody/Calling-GGUF")
    added = load_catalog().by_id["calling"]
    assert added.calls_tools == ("tool_call" in template)
    assert ("coding" in added.purposes) == added.calls_tools
    assert "chat" in added.purposes


def test_a_repository_without_gguf_files_is_an_error_and_adds_no_model(hub: Hub) -> None:
    hub.add("somebody/Other", {"README.md": b"nothing"})
    with pytest.raises(DownloadError, match="has no GGUF files"):
        run("update", "somebody/Other")
    assert not (user_folder() / UPDATE_FILE).exists()
