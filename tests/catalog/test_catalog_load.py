"""The catalog's public behaviour: its contents, its load time, and the effects of a user's own
file."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from catalog.family_schema import ModelTable, SourceTable
from localllm_catalog import build, catalog, check, shapes
from localllm_catalog.errors import BadCatalogError

MINE = """
family = "mine"
[[models]]
id = "mine-1b"
name = "Mine 1B"
hf_repo = "me/mine"
release_date = "2026-01-02"
licence = "MIT"
params = 1_235_800_000
purposes = ["chat"]
layers = 16
hidden = 2048
ffn = 8192
heads = 32
kv_heads = 8
head_dim = 64
vocab = 128256
context = 8192
tied = true
architecture = "dense"
tokenizer = "llama3-bpe"
sources = ["https://example.org/mine"]
[[models.gguf]]
repo = "me/mine-GGUF"
file = "mine-{quant}.gguf"
estimate = ["Q4_K_M"]
"""


@pytest.fixture(scope="module")
def loaded() -> catalog.Catalog:
    return catalog.load()


def test_the_catalog_covers_the_promised_number_and_range_of_models(
    loaded: catalog.Catalog,
) -> None:
    assert len(loaded.models) >= 90
    assert len({model.family for model in loaded.models}) >= 25
    assert min(model.params_total for model in loaded.models) < 140e6
    assert max(model.params_total for model in loaded.models) > 230e9


@pytest.mark.parametrize(
    "model_id",
    """qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b qwen3-coder-30b-a3b-instruct
    qwen3-next-80b-a3b-instruct qwen3-235b-a22b-instruct-2507 qwen3.5-9b qwen3.6-27b qwen3.8-27b
    qwen2.5-coder-7b-instruct llama-3.1-8b-instruct llama-3.3-70b-instruct gpt-oss-20b gpt-oss-120b gemma-3-27b-it
    gemma-4-26b-a4b-it glm-4.5-air glm-4.7-flash mistral-small-3.2-24b devstral-small-2-24b ministral-3-8b phi-4
    smollm2-135m-instruct granite-4.0-h-small nemotron-3-nano-30b-a3b lfm2.5-1.2b-instruct minimax-m2.7
    deepseek-r1-distill-qwen-32b""".split(),  # noqa: SIM905
)
def test_the_catalog_has_the_most_requested_models(loaded: catalog.Catalog, model_id: str) -> None:
    model = loaded.get(model_id)
    assert model is not None
    assert model.variants
    assert len(model.layers) > 8


@pytest.mark.parametrize(
    "family", sorted(catalog.FAMILIES_DIR.glob("*.toml")), ids=lambda path: path.stem
)
def test_every_family_file_conforms_to_the_schema(family: Path) -> None:
    for table in catalog.read_family(family):
        assert ModelTable.model_validate(
            {key: value for key, value in table.items() if key != "_file"}
        )


def test_every_source_table_conforms_to_the_schema() -> None:
    for table in catalog.read_sources().values():
        assert SourceTable.model_validate(table)


def test_the_catalog_check_reports_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0, capsys.readouterr().err
    assert "all consistent" in capsys.readouterr().out


def test_loader_and_schema_know_the_same_keys() -> None:
    assert {*ModelTable.model_fields, "_file"} == build.MODEL_KEYS


def test_the_whole_catalog_loads_within_its_budget() -> None:
    catalog.load()
    spent = []
    for _ in range(3):
        start = time.process_time()
        catalog.load()
        spent.append(time.process_time() - start)
    assert min(spent) < 0.5


def test_loading_imports_nothing_heavy() -> None:
    code = "import sys; from localllm_catalog import catalog; catalog.load(); print(*sys.modules)"
    path = str(Path(catalog.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(done.stdout.split())
    assert not modules & {
        "pydantic",
        "numpy",
        "localllm",
        "urllib.request",
        "httpx",
        "huggingface_hub",
    }


def test_names_ignore_case_and_common_suffixes(loaded: catalog.Catalog) -> None:
    assert loaded.get("Qwen3-8B") is loaded.get("qwen3-8b")
    assert loaded.get("smollm2-135m") is loaded.get("smollm2-135m-instruct")
    assert loaded.get("gemma-3-4b") is loaded.get("gemma-3-4b-it")
    assert loaded.get("no-such-model") is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen3-8", "qwen3-8b"),
        ("qwen38b", "qwen3-8b"),
        ("Qwen/Qwen3-14B", "qwen3-14b"),
        ("gptoss-20b", "gpt-oss-20b"),
    ],
)
def test_suggestions_resemble_the_typed_name(
    loaded: catalog.Catalog, typed: str, meant: str
) -> None:
    assert meant in loaded.suggest(typed)


def test_a_very_different_name_gets_no_suggestion(loaded: catalog.Catalog) -> None:
    assert loaded.suggest("zzzzzzzz") == []


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("/models/Qwen_Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
        ("Qwen3-Coder-30B-A3B-Instruct-UD-Q4_K_XL.gguf", "qwen3-coder-30b-a3b-instruct"),
        ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", "gpt-oss-120b"),
        ("mlx-community/Qwen3-14B-4bit", "qwen3-14b"),
        ("Qwen/Qwen3-14B", "qwen3-14b"),
        ("unsloth/gemma-3-27b-it-GGUF", "gemma-3-27b-it"),
        ("C:\\models\\Qwen3.5-9B-Q6_K.gguf", "qwen3.5-9b"),
        ("Qwen3-9B-Q4_K_M.gguf", None),
        ("Qwen3-8B-abliterated-Q4_K_M.gguf", None),
        ("my-qwen3-8b-finetune.gguf", None),
        ("", None),
    ],
)
def test_published_names_are_recognised_and_others_are_not(
    loaded: catalog.Catalog, name: str, model_id: str | None
) -> None:
    found = loaded.recognise(name)
    assert (found.id if found else None) == model_id


def test_every_own_repository_is_recognised(loaded: catalog.Catalog) -> None:
    for model in loaded.models:
        assert loaded.recognise(model.hf_repo) is model
        assert loaded.recognise("nothing", model.id) is model


def test_a_users_file_adds_a_model(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    mine = catalog.load(tmp_path).get("mine-1b")
    assert mine is not None
    assert shapes.kv_bytes_per_token(mine) == 32_768
    (variant,) = mine.variants
    assert variant.files == ("mine-Q4_K_M.gguf",)
    assert not variant.exact
    assert variant.file_bytes == pytest.approx(808e6, rel=0.02)
    assert check.main([str(tmp_path)]) == 0


def test_a_users_file_changes_only_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        '[[models]]\nid = "Qwen3-8B"\nsampling = { temperature = 0.1 }\ncontext = 40960\n'
    )
    before, after = catalog.load().get("qwen3-8b"), catalog.load(tmp_path).get("qwen3-8b")
    assert before is not None
    assert after is not None
    assert (after.sampling.temperature, after.sampling.top_p) == (0.1, before.sampling.top_p)
    assert after.native_context == 40_960
    assert (after.family, after.layers, after.variants) == (
        before.family,
        before.layers,
        before.variants,
    )
    assert len(catalog.load(tmp_path).models) == len(catalog.load().models)


def test_a_missing_folder_adds_no_models(tmp_path: Path) -> None:
    assert catalog.load(tmp_path / "none").models == catalog.load().models


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("context = 8192", "contxt = 8192"), "contxt"),
        (("layers = 16\n", ""), "layers"),
        (("layers = 16", 'layers = "many"'), "mine-1b"),
        (('estimate = ["Q4_K_M"]', 'estimate = ["Q9_X"]'), "Q9_X"),
        (('repo = "me/mine-GGUF"', 'repo = "../../etc"'), "../../etc"),
        (('repo = "me/mine-GGUF"', 'repo = "me/..mine"'), "me/..mine"),
        (('file = "mine-{quant}.gguf"', 'file = "../../../.ssh/authorized_keys"'), ".ssh"),
        (('file = "mine-{quant}.gguf"', 'file = "/etc/passwd"'), "/etc/passwd"),
        (('file = "mine-{quant}.gguf"', "file = 'C:\\x.gguf'"), "C:"),
        (("tied = true", 'pattern = ["sideways"]'), "sideways"),
        (("tied = true", 'pattern = ["full*99"]'), "99 layers"),
        (('id = "mine-1b"', 'name2 = "x"'), "id"),
        (("[[models]]", "[[models]"), "TOML"),
        (("tied = true", "quality.nobody = { MMLU = 1.0 }"), "nobody"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_reason(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    text = MINE.replace(*change)
    assert text != MINE
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(BadCatalogError) as caught:
        catalog.load(tmp_path)
    assert says in caught.value.message
    assert "mine.toml" in caught.value.message


def test_the_check_reports_a_users_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(
        MINE.replace("1_235_800_000", "2_000_000_000").replace('"2026-01-02"', '"soon"')
    )
    assert check.main([str(tmp_path)]) == 1
    complaints = capsys.readouterr().err
    assert "release_date" in complaints
    assert "2,000,000,000" in complaints


def test_every_quality_claim_is_dated_and_sourced(loaded: catalog.Catalog) -> None:
    claims = [claim for model in loaded.models for claim in model.quality]
    assert len(claims) > 150
    for claim in claims:
        assert claim.date.startswith("202")
        assert "https://" in claim.source
        assert claim.kind


def test_sizes_are_exact_or_marked_as_estimated(loaded: catalog.Catalog) -> None:
    for model in loaded.models:
        for variant in model.variants:
            assert variant.file_bytes > 0
            assert variant.source
            assert variant.exact is False or "estimated" not in variant.source


def test_draft_models_are_smaller_and_have_the_same_vocabulary(loaded: catalog.Catalog) -> None:
    pairs = [(model, loaded.get(draft)) for model in loaded.models for draft in model.drafts]
    assert len(pairs) > 30
    for model, draft in pairs:
        assert draft is not None
        assert draft.tokenizer_family == model.tokenizer_family
        assert draft.params_total < model.params_total
