"""Names of repositories and files come from files and hubs. Only plain relative names may become
paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm_catalog import catalog, stated
from localllm_catalog.errors import BadCatalogError
from localllm_catalog.names import check_file, check_repo

BAD_FILES = [
    "", ".", "..", "../x", "a/../b", "/etc/passwd", "C:\\x", "a\\b", "a//b", "~/x", "-rf", "x\0y",
    "x\ny",
    "/".join("abcdefghijklmnopq"), "x..gguf/..", "con\u202egguf", "x\x1b[2J.gguf", "x\x9b2J",
    "ü" * 128, " x", "a/.b",
]  # fmt: skip
BAD_REPOS = [
    "",
    "x",
    "a/b/c",
    "../b",
    "a/..",
    "a/b..c",
    "/b",
    "a/",
    "https://x/y",
    "a b/c",
    "pypi:../x",
]


@pytest.mark.parametrize("name", BAD_FILES)
def test_file_names_that_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(BadCatalogError):
        check_file(name)


@pytest.mark.parametrize(
    "repo",
    ["", "x", "a/b/c", "../b", "a/..", "a/b..c", "/b", "a/", "https://x/y", "a b/c", "pypi:../x"],
)
def test_repository_names_that_leave_their_folder_are_refused(repo: str) -> None:
    with pytest.raises(BadCatalogError):
        check_repo(repo)


def test_all_names_of_the_catalog_pass() -> None:
    for model in catalog.load().models:
        for variant in model.variants:
            assert check_repo(variant.repo)
            assert all(check_file(name) for name in variant.files)


@given(st.text(max_size=30))
def test_accepted_names_stay_inside_their_folder(name: str) -> None:
    try:
        check_file(name)
    except BadCatalogError:
        return
    assert not name.startswith(("/", "-", ".", "~"))
    assert ".." not in name
    assert not set(name) & set("\\:\0\n")


@pytest.mark.parametrize(
    ("template", "calls", "kind"),
    [
        ("<tool_call>\n<function=", True, "none"),
        ("<tool_call>{{x}}</tool_call> <think>", True, "hybrid"),
        ("{% if tools %}[TOOL_CALLS][ARGS][THINK]", True, "hybrid"),
        ("{% if tools %}<|channel|>analysis to=functions.x", True, "hybrid"),
        ("{{ messages }}", False, "none"),
        ("{{ message.reasoning_content }} I think", False, "none"),
    ],
)
def test_tools_and_reasoning_kind_are_detected_from_templates(
    template: str, calls: bool, kind: str
) -> None:
    assert stated.calls_tools(template) == calls
    assert stated.reasoning_kind(template) == kind
