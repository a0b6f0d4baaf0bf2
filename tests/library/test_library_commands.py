"""`localllm pull` and `localllm models` for users and scripts: data on stdout, the rest on
stderr."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from library.hub import Hub, Schedule
from localllm.cli.commands import models, pull
from localllm.errors import (
    DownloadError,
    ModelFileError,
    ModelNotFoundError,
    UsageError,
)
from localllm.formatting import span
from localllm.library import hf_cache, store
from localllm.library.names import check_readable
from localllm.library.pull import pull as fetch
from localllm.library.resolve import resolve
from localllm.library.transfer import DownloadMeter, DownloadProgress
from localllm_catalog.types import Companion
from support.until import until

pytestmark = pytest.mark.usefixtures("nothing_packaged")
REPO = "maker/Tiny-1B-GGUF"

app = typer.Typer()
app.command()(pull.pull)
app.add_typer(models.app)


def run(*arguments: str, answer: str = "") -> Result:
    """Run a command. Raise an error of ours, which the root command would catch."""
    result = CliRunner().invoke(app, list(arguments), input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def published(hub: Hub, tiny_model: Path) -> Hub:
    """Return a hub with one repository of two variants."""
    hub.add(
        REPO,
        {
            "Tiny-1B-Q4_K_M.gguf": tiny_model.read_bytes(),
            "Tiny-1B-Q8_0.gguf": b"GGUF" + random.Random(1).randbytes(89_996),
        },
    )
    return hub


# --- pull -----------------------------------------------------------------------------------------


def test_pull_prints_the_path_and_nothing_else_to_stdout(published: Hub) -> None:
    result = run("pull", REPO)
    path = Path(result.stdout.strip())
    assert path.is_file()
    assert path.name == "Tiny-1B-Q4_K_M.gguf"
    assert f"localllm chat -m {REPO}" in result.stderr
    assert run("pull", REPO, "--quiet").stderr == ""
    assert run_json("pull", f"{REPO}:Q8_0")["quant"] == "Q8_0"


def test_pull_offline_fails_for_a_missing_model_and_sends_no_request(published: Hub) -> None:
    with pytest.raises(DownloadError, match="offline"):
        run("pull", REPO, "--offline")
    assert not published.seen
    run("pull", REPO)
    published.seen.clear()
    run("pull", REPO, "--offline")
    assert not published.seen


def test_a_failed_pull_leaves_no_half_line(published: Hub) -> None:
    published.schedule = Schedule(always=("content", "corrupt"))
    with pytest.raises(DownloadError, match="still differs"):
        run("pull", REPO)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(moments: list[tuple[float, DownloadProgress]], *, tty: bool) -> str:
    """Return the output of a ProgressLine for progress at these times."""
    written = Terminal() if tty else io.StringIO()
    now = [0.0]
    line = pull.ProgressLine(written, clock=lambda: now[0])
    for at, progress in moments:
        now[0] = at
        line(progress)
    line.close()
    return written.getvalue()


def download(at: float, done: int, total: int = 4_700_000_000) -> tuple[float, DownloadProgress]:
    return at, DownloadProgress(
        "downloading", "Qwen3-8B-Q4_K_M.gguf", done, total, 85e6, (total - done) / 85e6
    )


def test_a_terminal_sees_size_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = lines_of([download(0.0, 2_100_000_000)], tty=True)
    assert "downloading Qwen3-8B-Q4_K_M.gguf  2.1 of 4.7 GB   45%  85.0 MB/s  31 s left" in text
    assert text.endswith("\r\033[K"), "the line is taken away at the end"


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_shows_progress_on_one_line(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = lines_of([download(0.0, 2_100_000_000)], tty=True)
    assert max(len(part.removeprefix("\033[K")) for part in text.split("\r")) < columns


def test_a_log_gets_a_progress_line_every_ten_seconds() -> None:
    text = lines_of([download(t / 10, t * 8_000_000) for t in range(300)], tty=False)
    assert text.count("\n") == 3
    assert "\r" not in text
    assert "\033" not in text


def test_a_log_gets_no_progress_line_for_small_files() -> None:
    header = DownloadProgress("downloading", "ggml.h", 0, 30_000, 0.0, None)
    text = lines_of([(0.0, header), download(0.1, 0)], tty=False)
    assert "ggml.h" not in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(("seconds", "said"), [
    (0.4, "0.4 s"), (59.4, "59 s"), (150, "2.5 min"), (9000, "2.5 h"),
])  # fmt: skip
def test_durations_are_rounded_like_estimates(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_the_speed_is_that_of_the_last_seconds_and_the_waits_do_not_count() -> None:
    told: list[DownloadProgress] = []
    now = [0.0]
    meter = DownloadMeter(1_000_000, told.append, clock=lambda: now[0])
    for second in range(30):
        now[0] = float(second)
        # Fast at first, then 1,000 bytes per second.
        meter.report(
            "downloading", "f", second * 10_000 if second < 10 else 90_000 + second * 1_000
        )
    assert told[-1].speed_bytes_s == pytest.approx(1_000, rel=0.01)
    assert told[-1].eta_s == pytest.approx((1_000_000 - told[-1].done_bytes) / 1_000, rel=0.01)
    meter.report("waiting", "f", 119_000)
    assert told[-1].speed_bytes_s == 0


# --- models ---------------------------------------------------------------------------------------


def test_the_list_names_every_model_and_where_it_is(published: Hub) -> None:
    assert "no model" in run("models").stderr
    run("pull", REPO)
    assert run("models").stdout.splitlines()[1].split() == [
        "Tiny-1B-Q4_K_M",
        "Q4_K_M",
        "670",
        "kB",
        "gguf",
        "hf-cache",
    ]
    (row,) = run_json("models", "list")["models"]
    assert (row["repo"], row["origin"], row["files"]) == (REPO, "hf-cache", [row["path"]])


def test_info_describes_installed_and_catalog_models(published: Hub) -> None:
    run("pull", REPO)
    assert run_json("models", "info", REPO)["local"]["quant"] == "Q4_K_M"
    assert "KV each at f16" in run("models", "info", REPO).stdout
    body = run_json("models", "info", "qwen3-8b")
    assert body["local"] is None
    assert body["model"]["kv_bytes_per_token_f16"] == 147_456
    assert "localllm pull qwen3-8b" in run("models", "info", "qwen3-8b").stdout
    with pytest.raises(ModelNotFoundError):
        run("models", "info", "no-such-model-at-all")


def test_rm_asks_first_and_frees_what_nothing_else_uses(published: Hub, cache: Path) -> None:
    run("pull", f"{REPO}:Q4_K_M")
    run("pull", f"{REPO}:Q8_0")
    with pytest.raises(UsageError, match="2 models") as caught:
        run("models", "rm", REPO, "--yes")
    assert f"{REPO}:Q8_0" in caught.value.hint
    with pytest.raises(UsageError, match="confirmation needs a terminal"):
        run("models", "rm", f"{REPO}:Q8_0")
    assert run_json("models", "rm", f"{REPO}:Q8_0", "--yes")["freed_bytes"] == 90_000
    assert [m.quant for m in store.scan()] == ["Q4_K_M"]
    run("models", "rm", REPO, "--yes")
    assert store.scan() == []
    assert not hf_cache.repo_folder(cache, REPO).exists()
    with pytest.raises(ModelNotFoundError):
        run("models", "rm", REPO, "--yes")


def test_rm_refuses_a_model_of_another_application(home: Path, tiny_model: Path) -> None:
    folder = home / ".lmstudio" / "models" / "maker" / "Tiny"
    folder.mkdir(parents=True)
    shutil.copy(tiny_model, folder / "Tiny-Q4_0.gguf")
    with pytest.raises(UsageError, match="belongs to LM Studio"):
        run("models", "rm", "tiny", "--yes")
    assert (folder / "Tiny-Q4_0.gguf").exists()


def test_verify_exits_with_4_if_a_bit_was_flipped(published: Hub) -> None:
    path = Path(run("pull", REPO).stdout.strip())
    assert run("models", "verify").stdout.startswith("ok ")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.resolve().write_bytes(content)
    result = run("models", "verify", REPO)
    assert result.exit_code == 4
    assert result.stdout.startswith("BAD ")
    (row,) = run_json("models", "verify")["models"]
    assert row["result"] == "bad"
    assert row["fix"]
    assert row["fix"] in result.stdout
    # The solution is to pull again: the damaged blob is detected and replaced.
    path.unlink()
    run("pull", REPO)
    assert run("models", "verify").exit_code == 0


def test_verify_of_a_file_without_a_published_hash_reads_its_header(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(tiny_model, folder / "whole-F32.gguf")
    (folder / "cut-F32.gguf").write_bytes(tiny_model.read_bytes()[:-1000])
    store.adopt(folder)
    assert {m["name"]: m["result"] for m in run_json("models", "verify")["models"]} == {
        "whole-F32": "whole", "cut-F32": "bad",
    }  # fmt: skip


def test_prune_removes_partials_and_orphans_but_nothing_that_may_be_in_use(
    published: Hub, cache: Path
) -> None:
    run("pull", REPO)
    blobs = hf_cache.repo_folder(cache, REPO) / "blobs"
    old, fresh = blobs / ("a" * 64 + ".incomplete"), blobs / ("b" * 64 + ".incomplete")
    theirs, orphan = blobs / ("d" * 64 + ".0123abcd.incomplete"), blobs / ("c" * 64)
    for file in (old, fresh, theirs, orphan):
        file.write_bytes(b"x" * 1000)
    hour_ago = time.time() - 3600
    for file in (old, theirs, orphan):
        os.utime(file, (hour_ago, hour_ago))
    assert run_json("models", "du")["usage"][-1] == {
        "origin": "partial",
        "n_models": 3,
        "size_bytes": 3000,
    }
    assert run_json("models", "prune", "--dry-run")["freed_bytes"] == 0
    assert old.exists()
    body = run_json("models", "prune", "--yes")
    assert (len(body["found"]), body["freed_bytes"]) == (3, 3000)
    assert fresh.exists()
    assert store.verify(store.scan()[0]).result == "ok"


def test_adopt_and_forget(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(tiny_model, folder / "Mine-Q6_K.gguf")
    assert run_json("models", "adopt", str(folder))["models"][0]["origin"] == "folder"
    run("models", "adopt", str(folder), "--forget")
    assert store.scan() == []
    with pytest.raises(UsageError, match="not an adopted folder"):
        run("models", "adopt", str(folder), "--forget")


def test_a_long_download_measures_the_machine_once_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from localllm.device import detect

    asked: list[bool] = []
    monkeypatch.setattr(detect, "detect", lambda *, measure: asked.append(measure))
    seen: list[str] = []
    watch = pull.measuring_meter(lambda progress: seen.append(progress.state))
    for done_bytes in (0, 10**6):
        watch(DownloadProgress("downloading", "small.gguf", done_bytes, 10**8))
    watch(DownloadProgress("verifying", "large.gguf", 0, 10**10))
    assert asked == []
    for done_bytes in (0, 10**9, 2 * 10**9):
        watch(DownloadProgress("downloading", "large.gguf", done_bytes, 10**10))
    until(lambda: asked)
    assert asked == [True]
    assert len(seen) == 6


def test_pulling_a_model_names_the_drafters_that_are_published_for_it() -> None:
    (found,) = pull.companions_of("qwen3.8-27b:Q8_0")
    assert (found.kind, found.file) == ("mtp", "mtp-Qwen3.8-27B-Q4_0.gguf")
    assert (
        found.url
        == "https://huggingface.co/ggml-org/Qwen3.8-27B-GGUF/blob/main/mtp-Qwen3.8-27B-Q4_0.gguf"
    )
    assert pull.companions_of("org/name") == ()
    (folder,) = pull.companions_of("qwen3.8-27b", of_folder=True)
    assert (folder.kind, folder.repo) == ("dflash", "z-lab/Qwen3.8-27B-DFlash2")
    said = pull.drafter_text("qwen3.8-27b", found, None)
    assert said.startswith(
        "a drafter for it (mtp, ggml-org/Qwen3.8-27B-GGUF, mtp-Qwen3.8-27B-Q4_0.gguf): its MTP "
        "heads in a separate file"
    )
    trained = Companion("dflash", "org/heads", "d.gguf")
    assert "`localllm pull qwen3.8-27b --drafter`" in pull.drafter_text(
        "qwen3.8-27b", trained, None
    )
    assert "`--draft /kept/d.gguf`" in pull.drafter_text(
        "qwen3.8-27b", trained, Path("/kept/d.gguf")
    )


def test_the_json_output_of_pull_has_the_drafters_path(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.add("org/heads", {"d.gguf": b"heads"})
    monkeypatch.setattr(
        pull,
        "companions_of",
        lambda ref, *, of_folder: (Companion("eagle3", "org/heads", "d.gguf"),),
    )
    assert run_json("pull", REPO)["drafter"] is None
    assert Path(run_json("pull", REPO, "--drafter")["drafter"]).read_bytes() == b"heads"


@pytest.mark.parametrize(
    "ref", ["prism-ml/Ternary-Bonsai-2-27B-gguf:Q2_0", "Bonsai2-4B.gguf", "bonsai_2_27b"]
)
def test_pull_refuses_a_model_that_the_engine_reads_wrong_without_an_error(ref: str) -> None:
    with pytest.raises(ModelFileError, match="Bonsai 2"):
        fetch(ref)


def test_a_file_with_the_name_of_a_wrongly_read_model_is_refused_too(
    smollm2: Path, tmp_path: Path
) -> None:
    file = tmp_path / "Ternary-Bonsai-2-27B-Q2_0.gguf"
    shutil.copyfile(smollm2, file)
    with pytest.raises(ModelFileError, match="Bonsai 2"):
        resolve(str(file))


def test_older_models_of_a_refused_family_are_accepted() -> None:
    refused = []
    for name in (
        "Bonsai-27B-Q1_0",
        "Ternary-Bonsai-27B-Q2_0",
        "bonsai-8b",
        "bonsai-2.5b",
        "Bonsai-2-27B",
    ):
        try:
            check_readable(name)
        except ModelFileError:
            refused.append(name)
    assert refused == ["Bonsai-2-27B"]
