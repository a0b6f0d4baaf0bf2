"""The command `localllm recommend`: width, JSON, errors, speed, and cached measurements."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.commands import recommend
from localllm.cli.commands.device import lines as device_lines
from localllm.device.name_lookup import resolve
from localllm.errors import ModelNotFoundError, UsageError
from localllm.load import measurements

app = typer.Typer()
app.command()(recommend.recommend)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "M4 Max 128GB"],
        ["--device", "Jetson Orin Nano", "--for", "coding"],
        ["--device", "RTX 5090", "-m", "qwen3-32b"],
        ["--device", "DGX Spark", "--compare", "RTX 5090"],
        ["--device", "RTX 4090", "--all"],
        ["--device", "DGX Spark", "--what-if", "RTX 5090"],
        ["--device", "M2 16GB", "--plot"],
        ["--device", "H100", "--for", "long"],
        ["--device", "M4 Max 128GB", "--explain"],
        ["--device", "M2 16GB", "-m", "qwen3-8b", "--explain"],
        ["--compare", "M4 Max 128GB", "DGX Spark", "Strix Halo 128GB"],
        ["-m", "qwen3-8b", "--at", "60"],
    ],
)
def test_everything_fits_80_columns(arguments: list[str]) -> None:
    for line in run(*arguments).splitlines():
        assert len(line) <= 80, line


@pytest.mark.parametrize("columns", [60, 100, 160])
def test_the_terminals_width_is_used(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (
        ["--device", "M4 Max 128GB", "--explain"],
        ["--device", "RTX 4090", "--for", "agents", "--all"],
        ["--device", "M2 16GB", "-m", "qwen3-8b", "--explain"],
        ["--device", "DGX Spark", "--compare", "RTX 5090"],
    ):
        lines = run(*arguments).splitlines()
        assert all(len(line) <= columns for line in lines), max(lines, key=len)
        assert (max(len(line) for line in lines) > 80) == (columns > 80)


def test_a_wide_terminal_shows_complete_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    everything = run("--device", "M4 Max 128GB", "--all")
    assert "DeepSeek-R1-Distill-Qwen-32B" in everything.replace(" Distill", "-Distill")
    assert "…" not in everything


def test_unlisted_files_are_marked_and_the_mark_is_explained() -> None:
    text = run("--device", "RTX 3060 12GB", "--all")
    assert "~Q6_K" in text
    assert "not in any listing" in text
    body = json.loads(run("--device", "RTX 3060 12GB", "--all", "--json"))
    constructed = [p["variant"]["listed"] for p in body["plans"]]
    assert {True, False} == set(constructed)
    # and the footnote
    assert text.partition("\nabout the first")[0].count("~") == constructed.count(False) + 1


def test_installed_models_are_marked(smollm2: Path) -> None:
    text = run("-m", "smollm2-135m-instruct")
    assert "Q4_1+" in text
    assert "+ installed" in text
    assert "+ installed" not in run("--device", "RTX 4090", "-m", "smollm2-135m-instruct")


def test_commands_to_run_are_printed_only_for_this_machine() -> None:
    assert "localllm pull" not in run("--device", "M4 Max 128GB")
    # Run it once: this machine's free memory and measured bandwidth may differ a second later.
    text = run()
    quant = re.search(r"^  1 .*? ~?(\S+) +[\d.]+ GB ", text, re.MULTILINE)
    told = re.fullmatch(
        r"localllm pull (\S+) && localllm chat -m (\S+):(\S+)", text.splitlines()[-1]
    )
    assert quant
    assert told, "the last line is what to type"
    assert told[1] == f"{told[2]}:{told[3]}"
    assert told[3] == quant[1]


@pytest.mark.parametrize(
    ("machine", "purpose", "columns"),
    [
        ("", "chat", "80"),
        ("M4 Max 128GB", "coding", "80"),
        ("RTX 3060 12GB + 64GB RAM", "chat", "60"),
        ("EPYC 9654 768GB", "long", "80"),
        ("M1 8GB", "autocomplete", "160"),
    ],
)
def test_a_default_list_has_at_most_25_lines_without_jargon(
    machine: str, purpose: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = run("--for", purpose, *(["--device", machine] if machine else []))
    lines = text.splitlines()
    assert len(lines) <= 25
    assert re.search(r"^  1 \S", text, re.MULTILINE)
    for jargon in ("1st", "f16 context", "placed by", "quality index"):
        assert jargon not in text


def test_rejected_models_are_listed_by_needed_memory() -> None:
    lines = run("--device", "M2 16GB").splitlines()
    said = " ".join(lines[lines.index("Not offered:") + 1 :])
    needed = [float(found) for found in re.findall(r"needs ([\d.]+) GB", said)]
    assert needed
    assert needed == sorted(needed)
    assert needed[0] < 2 * 11.5


def test_an_answer_does_not_wait_for_kernel_or_memory_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timing the kernels takes some seconds, and the memory one. Only `pull` and `device --measure`
    do it."""
    from localllm.device import bandwidth
    from localllm.device.probes import matrix_rate

    def timed(*_: object, **__: object) -> None:
        raise AssertionError("somebody waits for this")

    monkeypatch.setattr(matrix_rate, "measure", timed)
    monkeypatch.setattr(bandwidth, "measure_rates", timed)
    assert "Recommended for chat" in run()


def test_one_models_table_on_a_mac_names_the_faster_engine_and_the_best_file() -> None:
    text = run("--device", "M2 16GB", "-m", "qwen3-8b")
    assert "the best variant on this machine:" in text
    assert "of the bandwidth" in " ".join(text.split())
    body = json.loads(run("--device", "M2 16GB", "-m", "qwen3-8b", "--json"))
    assert sum(bool(p["reasons"]) for p in body["plans"]) == 1


def test_json_is_one_document_and_the_same_every_time() -> None:
    one, two = run("--device", "DGX Spark", "--json"), run("--device", "DGX Spark", "--json")
    assert one == two
    body = json.loads(one)
    assert body["schema"] == 1
    assert 1 <= len(body["plans"]) <= 8


def test_this_machine_gets_an_answer_without_a_network() -> None:
    body = json.loads(run("--json", "--offline"))
    assert body["device"]["simulated"] is False
    assert body["plans"]


def test_explain_shows_the_arithmetic_of_the_first_plan() -> None:
    text = run("--device", "RTX 4090", "--explain")
    for word in ("weights", "KV cache", "compute", "bound", "KV read", "first token", "rating"):
        assert word in text


def test_a_local_file_can_be_planned(smollm2: Path) -> None:
    body = json.loads(run("-m", str(smollm2), "--json"))
    (plan,) = body["plans"]
    assert plan["memory"]["weights_bytes"] == 96_576_768
    assert plan["fits"] == "yes"


def test_a_file_of_an_unknown_architecture_is_marked_as_guessed(
    smollm2: Path, tmp_path: Path
) -> None:
    with smollm2.open("rb") as file:
        beginning = file.read(8 << 20)
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(
        beginning.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0other").replace(
            b"llama.", b"other."
        )
    )
    os.truncate(foreign, smollm2.stat().st_size)
    said = "the architecture 'other' is unknown"
    assert said in " ".join(run("-m", str(foreign), "--device", "M2 16GB").split())
    assert said not in " ".join(run("-m", str(smollm2), "--device", "M2 16GB").split())


def test_a_roofline_picture_is_written_to_the_given_path(tmp_path: Path) -> None:
    run("--device", "M4 Max 128GB", "--plot", str(tmp_path / "roof.svg"))
    assert (tmp_path / "roof.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-m", "qwen3-9b"], ModelNotFoundError),
        (["--for", "poetry"], UsageError),
        (["--device", "RTX 5090", "RTX 4090"], UsageError),
        (["--compare"], UsageError),
        (["--plot", "one.svg", "two.svg"], UsageError),
        (["--at", "30"], UsageError),
    ],
)
def test_invalid_arguments_give_one_clear_error(
    arguments: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(*arguments)


def test_an_unknown_model_name_suggests_similar_names() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        run("-m", "qwen3-9b")
    assert "qwen3" in caught.value.hint


def test_the_requested_quant_is_explained() -> None:
    text = run("--device", "M4 Max 128GB", "-m", "llama-3.3-70b-instruct:Q4_K_M", "--explain")
    assert "about Q4_K_M" in text
    assert "4bit " not in text.partition("memory at")[0]
    body = json.loads(
        run("--device", "M4 Max 128GB", "-m", "llama-3.3-70b-instruct:q4_k_m", "--json")
    )
    assert [p["variant"]["quant"] for p in body["plans"]] == ["Q4_K_M"]


@pytest.mark.parametrize(
    ("reference", "device"), [("qwen3-8b:Q99", "M4 Max 128GB"), ("qwen3-8b:4bit", "RTX 4090")]
)
def test_an_unknown_quant_lists_the_available_ones(reference: str, device: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        run("--device", device, "-m", reference)
    assert reference.partition(":")[2] in caught.value.message
    assert "Q4_K_M" in caught.value.hint


def test_local_measurements_are_stored_and_shown() -> None:
    before = json.loads(run("-m", "qwen3-8b", "--json"))
    machine = before["device"]["name"]
    record = measurements.Record(
        machine, "smollm2-135m-instruct", "Q4_1", "llamacpp", 150.0, 64, n_ctx=4096,
        memory_bytes=10**9,
    )  # fmt: skip
    measurements.keep(record)
    measurements.keep(record)
    assert measurements.load() == [record]
    after = json.loads(run("-m", "qwen3-8b", "--json"))
    assert after["plans"][0]["decode_tok_s"]["basis"] == "measured here: smollm2-135m-instruct"


def test_a_damaged_measurement_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "measurements.json"
    for text in ("{", "[]", '{"runs": [1, {"machine": "x"}, {"machine": 1, "model": 2}]}'):
        file.write_text(text)
        assert measurements.load(file) == []


def test_loading_the_command_loads_no_heavy_library() -> None:
    code = (
        "import sys, localllm.cli.commands.recommend, localllm.load.measurements;"
        "import localllm.cli.recommend.answers;"
        "heavy = {'numpy', 'llama_cpp', 'starlette', 'textual', 'httpx', 'huggingface_hub', 'mlx'} "
        "& set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_device_and_recommend_count_memory_in_one_unit() -> None:
    usable = "124.1 GB usable of 130.7"
    assert usable in run("--device", "DGX Spark")
    assert usable in "\n".join(device_lines(resolve("DGX Spark")))


def test_machines_are_compared_for_one_purpose() -> None:
    names = ["M4 Max 128GB", "DGX Spark", "Strix Halo 128GB"]
    text = run("--compare", *names, "--for", "agents")
    assert [text.count(f"Best on {resolve(name).name}") for name in names] == [1, 1, 1]
    assert "tok/s of each machine's models" in text
    body = json.loads(run("--compare", *names, "--json"))
    assert [machine["device"]["name"] for machine in body["machines"]] == [
        resolve(name).name for name in names
    ]


def test_a_single_machine_to_compare_is_compared_with_the_selected_device() -> None:
    for asked in (["--device", "DGX Spark"], []):
        body = json.loads(run(*asked, "--compare", "RTX 5090", "--json"))
        mine, other = (machine["device"] for machine in body["machines"])
        assert mine["simulated"] == bool(asked)
        assert other["name"] == resolve("RTX 5090").name


def test_only_machines_that_reach_the_requested_speed_are_listed() -> None:
    body = json.loads(run("-m", "llama-3.3-70b-instruct:Q4_K_M", "--at", "20", "--json"))
    found = {machine["device"]: machine for machine in body["machines"]}
    assert all(
        m["decode_tok_s"] >= 20 and m["quant"] == "Q4_K_M" and m["fits"] != "no"
        for m in found.values()
    )
    assert any(name.startswith("H100") for name in found)
    assert not any("3060" in name or "DGX Spark" in name for name in found)  # too small, too slow
    assert "is too slow: " in run("-m", "llama-3.3-70b-instruct:Q4_K_M", "--at", "20")
    assert "no machine in the table reaches that" in run(
        "-m", "llama-3.3-70b-instruct:Q8_0", "--at", "900"
    )


def test_explain_prints_the_arithmetic_before_the_table() -> None:
    text = run("--device", "RTX 4090", "--explain")
    assert text.index("decode, one token") < text.index("Recommended for chat")


def test_only_vision_models_are_listed_on_request() -> None:
    from localllm_catalog import catalog

    seeing = {m.id for m in catalog.load().models if "image" in m.modality}
    plans = json.loads(run("--device", "DGX Spark", "--sees", "--json"))["plans"]
    assert plans
    assert {p["model"] for p in plans} <= seeing


@pytest.mark.parametrize(
    "asked",
    [
        ["--explain", "--device", "RTX 3060 12GB + 64GB RAM"],
        ["-m", "gpt-oss-120b", "--explain", "--device", "RTX 4090 + 96GB DDR5-6000"],
        ["-m", "qwen3-8b", "--device", "M4 Max 128GB"],
        ["--all", "--device", "M2 16GB"],
    ],
)
def test_printed_sizes_use_the_unit_of_the_device_command(asked: list[str]) -> None:
    """All output uses GB of 10^9 bytes, as `localllm device` does."""
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "120"}).output
    assert " GB" in shown
    assert [line for line in shown.splitlines() if re.search(r"\d ?[KMGT]iB\b", line)] == []


def test_printed_parts_of_the_memory_add_up() -> None:
    shown = (
        CliRunner()
        .invoke(app, ["--explain", "--device", "RTX 4090"], env={"COLUMNS": "120"})
        .output
    )
    memory = shown.partition("memory\n")[2].partition("decode, one token")[0]
    figures = {
        m[1].strip(): float(m[2].replace(",", ""))
        for m in re.finditer(
            r"^  (\S.{11}) +([\d,.]+) "
            r"GB",
            memory,
            re.M,
        )
    }
    parts = sum(
        figures.get(name, 0.0)
        for name in ("weights", "KV cache", "state", "compute", "runtime", "draft")
    )
    assert figures["total"] == pytest.approx(parts, abs=0.0035)


def test_a_split_plan_lists_system_memory_and_counts_it_in_its_size() -> None:
    said = " ".join(run("--device", "rtx 3060 12GB + 64GB RAM", "--all").split())
    assert "plus 63.1 GB of system memory at 51 GB/s (assumed)" in said
    assert re.search(r"experts of \d+ of \d+ layers run from system memory, \d+\.\d GB", said)
    plans = json.loads(run("--device", "rtx 3060 12GB + 64GB RAM", "--json"))["plans"]
    needed = [p["memory"]["total_bytes"] + p["memory"]["host_bytes"] for p in plans]
    for plan, bytes_in_all in zip(plans, needed, strict=True):
        if "less than the first" in plan["why"]:
            assert bytes_in_all < needed[0], plan["why"]
    bases = said[said.index("speeds from") : said.index("about the first")]
    assert bases.count("system memory 36 GB/s") == 1


def test_the_table_of_one_model_names_a_kv_type_other_than_f16() -> None:
    said = run("--device", "rtx 3060 12GB + 64GB RAM", "-m", "gpt-oss-120b")
    assert "with a q8_0 KV cache: MXFP4" in said


def test_points_are_compared_with_rated_models_only() -> None:
    """If the first pick has no rating, other picks can't have fewer points than it."""
    plans = json.loads(run("--device", "RTX 4090", "--for", "autocomplete", "--json"))["plans"]
    first = plans[0]
    assert "no public score" not in first["why"]
    compared = [p["why"] for p in plans if re.search(r"; rated \d+ points? lower", p["why"])]
    assert compared
    assert not any("no public score" in why for why in compared)


def test_the_prefill_parts_of_a_split_plan_add_up() -> None:
    said = run("--device", "rtx 3060 12GB + 64GB RAM", "-m", "gpt-oss-120b", "--explain")
    prompt = said[said.index("prompt, per token") : said.index("first token")]
    micros = [float(found) for found in re.findall(r"([\d.]+) µs", prompt)]
    rate = float(re.search(r"prefill +(\d+)", prompt)[1])  # type: ignore[index]
    assert sum(micros) == pytest.approx(1e6 / rate, rel=0.01)


def test_models_recommended_for_one_machine_have_speeds_for_all_compared_machines() -> None:
    """A dash means that the model does not fit, not that another one ranks higher."""
    said = run("--compare", "M4 Max 128GB", "DGX Spark", "--for", "coding")
    rows = said[said.index("tok/s of each machine's models") :]
    assert re.search(r"Qwen3\.6 35B-A3B +\d+ +\d+\n", rows)


def test_an_assumption_about_a_size_is_printed_with_the_option_that_replaces_it() -> None:
    card = " ".join(run("--device", "RTX 5090 64GB", "-m", "qwen3-8b").split())
    assert "64 GB is assumed to be the computer's memory: no GeForce RTX 5090 has so much" in card
    mac = " ".join(run("--device", "M4", "-m", "qwen3-8b").split())
    assert "assumed 32 GB; it is sold with 16, 24, 32 GB; else: --memory GB" in mac
