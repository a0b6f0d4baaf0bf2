"""Pulling from a hub: downloaded files, refusals, and interruptions."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from library.hub import Hub, Schedule, git_sha1
from localllm.cli.all_commands import app
from localllm.errors import DownloadError, ModelNotFoundError, UsageError
from localllm.library import store
from localllm.library.catalog import load_catalog
from localllm.library.hf_cache import drafters_here
from localllm.library.hub import Patience
from localllm.library.pull import pull, pull_drafter
from localllm.library.resolve import resolve
from localllm.library.transfer import DownloadProgress
from localllm_catalog.types import Companion
from support.safetensors import safetensors

REPO = "tiny-org/Tiny-1B-GGUF"


def content(seed: int, size: int = 300_000) -> bytes:
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


def files(*quants: str) -> dict[str, bytes]:
    return {f"Tiny-1B-{q}.gguf": content(i) for i, q in enumerate(quants)}


def test_the_usual_variant_is_fetched_verified_and_seen_by_huggingface_hub(
    hub: Hub, cache: Path, patience: Patience
) -> None:
    repo = hub.add(REPO, files("Q4_K_M", "Q8_0"))
    local = pull(REPO, patience=patience)
    assert local.path.read_bytes() == repo.files["Tiny-1B-Q4_K_M.gguf"]
    assert (local.name, local.quant, local.repo, local.origin) == (
        "Tiny-1B-Q4_K_M",
        "Q4_K_M",
        REPO,
        "hf-cache",
    )

    from huggingface_hub import hf_hub_download, scan_cache_dir

    theirs = hf_hub_download(REPO, "Tiny-1B-Q4_K_M.gguf", cache_dir=cache, local_files_only=True)
    assert Path(theirs) == local.path
    report = scan_cache_dir(cache)
    assert not report.warnings
    assert [r.repo_id for r in report.repos] == [REPO]
    assert not list(cache.rglob("*.incomplete"))


def test_the_hub_gets_no_telemetry(hub: Hub) -> None:
    """The hub gets no telemetry.

    The test uses a new process, because huggingface-hub reads its variables on import.
    """
    hub.add(REPO, files("Q4_K_M"))
    elsewhere = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(
        [sys.executable, "-m", "localllm", "pull", REPO],
        env={**elsewhere, "AI_AGENT": "some-agent"},
        check=True,
        capture_output=True,
    )
    assert hub.contents()
    assert {seen.path for seen in hub.seen if seen.kind == "api"} == {f"/api/models/{REPO}"}
    assert [seen.user_agent for seen in hub.seen if "agent/" in seen.user_agent] == []


@pytest.mark.parametrize("ref", [
    f"{REPO}:Q8_0", f"{REPO}:q8_0", f"hf.co/{REPO}:Q8_0", f"https://huggingface.co/{REPO}:Q8_0",
    f"https://huggingface.co/{REPO}/blob/main/Tiny-1B-Q8_0.gguf",
    f"https://hf.co/{REPO}/resolve/main/Tiny-1B-Q8_0.gguf?download=true",
])  # fmt: skip
def test_every_way_to_name_a_variant_selects_it(hub: Hub, patience: Patience, ref: str) -> None:
    repo = hub.add(REPO, files("Q4_K_M", "Q8_0"))
    assert pull(ref, patience=patience).path.read_bytes() == repo.files["Tiny-1B-Q8_0.gguf"]


def test_a_blob_damaged_after_its_download_is_downloaded_again(
    hub: Hub, cache: Path, patience: Patience
) -> None:
    repo = hub.add(REPO, files("Q4_K_M"))
    local = pull(REPO, patience=patience)
    with local.path.resolve().open("r+b") as blob:
        blob.seek(1000)
        blob.write(b"????")
    said = CliRunner().invoke(app, ["models", "verify", REPO])
    assert said.exit_code == 4
    assert f"`localllm pull {REPO}:Q4_K_M` downloads it again" in said.stdout
    assert pull(REPO, patience=patience).path.read_bytes() == repo.files["Tiny-1B-Q4_K_M.gguf"]
    hub.seen.clear()
    pull(REPO, patience=patience)
    assert not hub.contents()


def test_an_empty_name_is_a_usage_error(hub: Hub) -> None:
    for command in (["pull", ""], ["models", "info", ""], ["serve", " "]):
        said = CliRunner().invoke(app, command)
        assert (type(said.exception), said.stdout) == (UsageError, ""), command


def test_pull_names_the_files_of_a_repository_that_it_leaves_out(
    hub: Hub, patience: Patience, caplog: pytest.LogCaptureFixture
) -> None:
    old = {"old/Tiny-1B-Q4_K_M.gguf": content(7, 1000), "why?-Q4_K_M.gguf": content(8)}
    repo = hub.add(REPO, files("Q4_K_M") | old)
    assert pull(REPO, patience=patience).path.read_bytes() == repo.files["Tiny-1B-Q4_K_M.gguf"]
    assert "old/Tiny-1B-Q4_K_M.gguf" in caplog.text
    assert "why?-Q4_K_M.gguf (its name can't be used for a file)" in caplog.text


def test_the_second_pull_fetches_no_content(hub: Hub, patience: Patience) -> None:
    hub.add(REPO, files("Q4_K_M"))
    pull(REPO, patience=patience)
    hub.seen.clear()
    pull(REPO, patience=patience)
    assert not hub.contents()


def test_an_unknown_quant_says_which_there_are(hub: Hub, patience: Patience) -> None:
    hub.add(REPO, files("Q4_K_M", "Q8_0"))
    with pytest.raises(DownloadError) as e:
        pull(f"{REPO}:Q2_K", patience=patience)
    assert "Q4_K_M, Q8_0" in e.value.hint


def test_all_parts_of_a_split_gguf_are_downloaded_and_the_first_is_the_path(
    hub: Hub, patience: Patience
) -> None:
    parts = {f"Q4_K_M/Tiny-1B-Q4_K_M-{n:05d}-of-00003.gguf": content(n) for n in (1, 2, 3)}
    hub.add(REPO, parts | {"Q8_0/Tiny-1B-Q8_0-00001-of-00002.gguf": content(9)})
    local = pull(REPO, patience=patience)
    assert local.path.name == "Tiny-1B-Q4_K_M-00001-of-00003.gguf"
    assert [f.read_bytes() for f in local.files] == list(parts.values())
    assert local.size_bytes == 900_000
    assert local.name == "Tiny-1B-Q4_K_M"
    with pytest.raises(DownloadError):
        pull(f"{REPO}:Q8_0", patience=patience)  # the hub lacks a part, so it is not offered


def test_the_projector_is_downloaded_only_on_request(hub: Hub, patience: Patience) -> None:
    hub.add(
        REPO,
        files("Q4_K_M") | {"mmproj-F16.gguf": content(7), "mmproj-F32.gguf": content(8, 500_000)},
    )
    assert pull(REPO, patience=patience).mmproj is None
    local = pull(REPO, mmproj=True, patience=patience)
    assert local.mmproj is not None
    assert local.mmproj.name == "mmproj-F16.gguf"
    assert resolve(REPO).mmproj == local.mmproj


def test_the_small_files_of_an_mlx_folder_are_checked_by_their_git_hash(
    hub: Hub, cache: Path, patience: Patience
) -> None:
    config = json.dumps(
        {"quantization": {"bits": 4, "group_size": 64}, "model_type": "tiny"}
    ).encode()
    hub.add("mlx-community/Tiny-1B-4bit", {
        "config.json": config, "tokenizer.json": b"{}", "model.safetensors": safetensors(content(1)),
        "README.md": b"read me",
    })  # fmt: skip
    local = pull("mlx-community/Tiny-1B-4bit", patience=patience)
    assert local.format == "mlx"
    assert (local.path / "config.json").read_bytes() == config
    assert not (local.path / "README.md").exists()
    assert (cache / "models--mlx-community--Tiny-1B-4bit" / "blobs" / git_sha1(config)).is_file()
    assert [(m.name, m.quant, m.format) for m in store.scan() if m.origin == "hf-cache"] == [
        ("Tiny-1B-4bit", "4bit", "mlx")
    ]


def test_the_chooser_sees_what_is_there_with_real_sizes(
    hub: Hub, patience: Patience, tiny_model: Path
) -> None:
    gguf = tiny_model.read_bytes()
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": gguf, "Tiny-1B-Q8_0.gguf": gguf + b"\0" * 1000})
    offered: list[tuple[str, int]] = []

    def choose(model):  # type: ignore[no-untyped-def]
        offered.extend((v.quant, v.file_bytes) for v in model.variants)
        assert len(model.layers) == 2, "the header of the file on the hub was read"
        return model.variants[-1]

    assert pull(REPO, choose=choose, patience=patience).quant == "Q8_0"
    assert offered == [("Q4_K_M", len(gguf)), ("Q8_0", len(gguf) + 1000)]


def test_a_catalog_id_gets_the_variant_the_chooser_names(hub: Hub, patience: Patience) -> None:
    hub.add("unsloth/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q4_K_M.gguf": content(1)})
    hub.add("Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": content(2)})
    local = pull(
        "qwen3-0.6b",
        choose=lambda m: next(v for v in m.variants if v.quant == "Q8_0"),
        patience=patience,
    )
    assert local.path.read_bytes() == content(2)
    assert local.name == "qwen3-0.6b"
    assert resolve("qwen3-0.6b").path == local.path
    assert resolve("qwen3-0.6b:Q8_0").path == local.path
    assert pull("qwen3-0.6b:Q4_K_M", patience=patience).path.read_bytes() == content(1)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["../../etc/passwd:Q4", "org/../etc", "org/name/../../x", "a/b\\c", "https://evil.example/a/b",
                                 "hf.co/a", "https://huggingface.co/org/name/blob/main/../../../x.gguf"])  # fmt: skip
def test_references_that_hide_a_path_are_refused_before_the_hub_is_asked(
    hub: Hub, patience: Patience, ref: str
) -> None:
    with pytest.raises((UsageError, ModelNotFoundError)):
        pull(ref, patience=patience)
    assert not hub.seen


@pytest.mark.parametrize(
    "name", ["../../../.bashrc.gguf", "/etc/cron.d/x.gguf", "a\\..\\b.gguf", "C:evil.gguf"]
)
def test_a_hub_that_lists_a_path_outside_the_repository_is_refused(
    hub: Hub, home: Path, patience: Patience, name: str
) -> None:
    hub.add(REPO, files("Q4_K_M") | {name: content(3)})
    with pytest.raises(DownloadError) as e:
        pull(REPO, patience=patience)
    assert "unusable answer" in e.value.message
    assert not list(home.rglob("*.gguf"))


@pytest.mark.parametrize("override", [
    {"sha": "../../x"},
    {"sha": "main"},
    {"siblings": [{"rfilename": "a-Q4_K_M.gguf", "size": -1, "blobId": "0" * 40}]},
    {"siblings": [{"rfilename": "a-Q4_K_M.gguf", "size": 5, "blobId": "../x"}]},
])  # fmt: skip
def test_a_listing_with_invalid_hashes_or_sizes_is_refused(
    hub: Hub, patience: Patience, override: dict[str, object]
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    hub.api_override = override
    with pytest.raises(DownloadError):
        pull(REPO, patience=patience)


def test_a_gated_repository_is_explained_and_opened_by_the_token(
    hub: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    hub.gated.add(REPO)
    with pytest.raises((DownloadError, ModelNotFoundError)) as e:
        pull(REPO, patience=patience)
    assert "HF_TOKEN" in e.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull(REPO, patience=patience)
    assert all(s.authorization == "" for s in hub.contents()), "the token went to another host"
    assert any(s.authorization == "Bearer hf_secret" for s in hub.seen if s.kind == "resolve")


def test_an_unknown_repository_is_not_retried(
    hub: Hub, patience: Patience, waits: list[float]
) -> None:
    with pytest.raises(ModelNotFoundError):
        pull("nobody/nothing", patience=patience)
    assert not waits


def test_a_model_too_large_for_the_disk_is_refused_before_the_first_byte(
    hub: Hub, patience: Patience
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    with pytest.raises(DownloadError) as e:
        pull(REPO, patience=patience, reserve_bytes=10**16)
    assert "10000000.0 GB that are kept for everything else" in e.value.message
    assert " free" in e.value.message
    assert not hub.contents()


# --- the network away -----------------------------------------------------------------------------


def test_pull_offline_uses_an_installed_model_or_fails_with_the_reason(
    hub: Hub, patience: Patience
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    with pytest.raises(DownloadError) as e:
        pull(REPO, offline=True, patience=patience)
    assert "offline" in e.value.message
    local = pull(REPO, patience=patience)
    hub.seen.clear()
    assert pull(REPO, offline=True).path == local.path
    assert not hub.seen


@pytest.mark.parametrize("fault", ["500", "429", "reset", "hang", "garbage"])
def test_an_installed_model_works_while_the_hub_fails(
    hub: Hub, patience: Patience, fault: str
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    local = pull(REPO, patience=patience)
    hub.schedule = Schedule(always=("api", fault))
    short = Patience(read_s=0.1, connect_s=0.1, failures=2, sleep=lambda _: None)
    assert pull(REPO, patience=short).path == local.path
    with pytest.raises(DownloadError) as e:
        pull("nobody/else", patience=short)
    assert e.value.hint


def test_progress_counts_up_to_the_total_and_says_what_it_does(
    hub: Hub, patience: Patience
) -> None:
    hub.add(REPO, {f"Tiny-1B-Q4_K_M-{n:05d}-of-00002.gguf": content(n, 2_500_000) for n in (1, 2)})
    heard: list[DownloadProgress] = []
    pull(REPO, on_progress=heard.append, patience=patience)
    counted = [p.done_bytes for p in heard]
    assert counted == sorted(counted)
    assert heard[0].state == "listing"
    assert (heard[-1].state, heard[-1].done_bytes, heard[-1].total_bytes) == (
        "done",
        5_000_000,
        5_000_000,
    )
    moving = [p for p in heard if p.state == "downloading" and p.speed_bytes_s]
    assert moving


def test_a_drafter_of_the_catalog_is_downloaded_once_and_found_for_its_model(
    hub: Hub, patience: Patience
) -> None:
    model = next(
        m for m in load_catalog().models if any(c.kind == "dflash" and c.file for c in m.companions)
    )
    companion = next(c for c in model.companions if c.kind == "dflash")
    repo = hub.add(companion.repo, {companion.file: content(3), "other.gguf": content(4, 90)})
    assert drafters_here((model.id,), load_catalog()) == []
    path = pull_drafter(companion, patience=patience)
    assert path.read_bytes() == repo.files[companion.file]
    assert drafters_here((model.id,), load_catalog()) == [path]
    assert drafters_here(("org/another",), load_catalog()) == []
    hub.seen.clear()
    assert pull_drafter(companion, patience=patience) == path
    assert not hub.contents()


def test_a_drafter_for_mlx_is_downloaded_as_a_folder(hub: Hub, patience: Patience) -> None:
    model = next(m for m in load_catalog().models if m.id == "qwen3.8-27b")
    (companion,) = (c for c in model.companions if c.folder)
    config = b'{"architectures": ["DFlash2DraftModel"], "dflash_config": {}}'
    hub.add(companion.repo, {"config.json": config, "model.safetensors": content(5), "d.py": b"-"})
    path = pull_drafter(companion, patience=patience)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert drafters_here((model.id,), load_catalog()) == [path]
    assert pull(companion.repo, patience=patience).path == path, "by its repository too"
    hub.add(companion.repo, {"README.md": b"-"})
    with pytest.raises(DownloadError, match=r"holds no config\.json") as e:
        pull_drafter(companion, patience=patience)
    assert companion.repo in e.value.hint


def test_the_smallest_drafter_of_a_repository_is_downloaded(hub: Hub, patience: Patience) -> None:
    several = Companion("eagle3", "tiny-org/Tiny-EAGLE3-GGUF")
    hub.add(
        several.repo,
        {"a-f16.gguf": content(1, 900), "a-q8.gguf": content(2, 500), "README.md": b"-"},
    )
    assert pull_drafter(several, patience=patience).name == "a-q8.gguf"
    with pytest.raises(DownloadError, match=r"holds no gone\.gguf") as e:
        pull_drafter(Companion("eagle3", several.repo, "gone.gguf"), patience=patience)
    assert several.repo in e.value.hint
