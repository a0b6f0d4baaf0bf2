"""Libraries of other releases: a stub of llama.cpp 1.0 that is compiled here, libraries that lack a
function or whose layout differs from their headers, and a library that can't be loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from device import recordings
from localllm.device import ggml
from localllm.device.backend_view import query_build
from localllm.device.health import HealthFacts, health_checks
from localllm.device.machines import identify
from localllm_backends.llamacpp.binding.c_headers import read_headers
from localllm_backends.llamacpp.binding.descriptions import WantedNames
from localllm_backends.llamacpp.binding.engine_files import (
    HEADER_PREFIXES,
    headers_for,
    library_folder,
)
from localllm_backends.llamacpp.binding.requirements import wanted
from models import tiny_gguf
from support.native_library import compile_library, include_folder

PARAMETERS = "struct llama_context_params {"
# llama.h of 1.0: two additional fields at the start, and the functions of llama-ext.h with plain
# names.
NEW_FIELDS = "size_t moe_cache_size; float moe_cache_cpu_share;"
NEXTN = """
LLAMA_API void    llama_set_embeddings_nextn     (struct llama_context * ctx, bool value, bool masked);
LLAMA_API float * llama_get_embeddings_nextn     (struct llama_context * ctx);
LLAMA_API void    llama_set_nextn_layer_offset   (struct llama_context * ctx, int32_t offset);
LLAMA_API void    llama_set_embeddings_layer_inp (struct llama_context * ctx, uint32_t layer, bool value);
LLAMA_API float * llama_get_embeddings_layer_inp (struct llama_context * ctx, uint32_t layer);
"""
# Deprecated functions, which 1.0 removed. No module uses them.
REMOVED = (
    "llama_set_warmup", "llama_n_vocab", "llama_token_bos", "llama_free_model", "llama_n_layer",
)  # fmt: skip
# The functions whose results matter. The others return 0.
TYPED = """
#include "llama.h"
const char * llama_version(void) { return "1.0.0"; }
struct llama_model_params llama_model_default_params(void) {
    struct llama_model_params p = {0};
    p.n_gpu_layers = -1; p.split_mode = 1; p.use_extra_bufts = true;
    return p;
}
struct llama_context_params llama_context_default_params(void) {
    struct llama_context_params p = {0};
    p.n_ctx = 512; p.n_batch = 2048; p.n_ubatch = 512; p.n_seq_max = 1;
    p.n_threads = p.n_threads_batch = 4; p.pooling_type = p.rope_scaling_type = -1;
    p.yarn_ext_factor = -1; p.type_k = p.type_v = 1; p.offload_kqv = p.no_perf = true;
    return p;
}
static struct llama_context_params made;
struct llama_context * llama_init_from_model(struct llama_model * m, struct llama_context_params p) {
    made = p;
    return (struct llama_context *) &made;
}
uint32_t llama_n_ctx(const struct llama_context * c) { return made.n_ctx; }
uint32_t llama_n_seq_max(const struct llama_context * c) { return made.n_seq_max; }
"""
TYPED_NAMES = frozenset(re.findall(r"\b((?:llama)_\w+)\(", TYPED)) - {
    "llama_model",
    "llama_context",
}


def stub(
    folder: Path, *, without: Sequence[str] = (), fields_in_library: str = "", headers: bool = True
) -> Path:
    """Compile a stub of llama.cpp 1.0 and return the folder of its library.

    `without`: functions that the library does not export. `fields_in_library`: more fields at the
    start of llama_context_params that the headers do not have.
    """
    lib = folder / "lib"
    include = folder / "include"
    lib.mkdir(parents=True)
    shutil.copytree(include_folder(), include)
    for kept in include.glob("*.json"):
        kept.unlink()
    text = (include / "llama.h").read_text()
    for name in REMOVED:
        text = re.sub(rf"(?m)^.*DEPRECATED\(.*\b{name}\b(.|\n)*?;", "", text, count=1)
        assert not re.search(rf"\b{name}\b", text), name
    text = text.replace(PARAMETERS, PARAMETERS + NEW_FIELDS)
    declaration = re.search(r"(?m)^.*\bllama_context_default_params\(void\);", text)
    assert declaration is not None
    text = text.replace(declaration[0], declaration[0] + NEXTN)
    (include / "llama.h").write_text(text)
    known = wanted()
    every = WantedNames((*known.functions, "llama_*"), (), (), (), ())
    described = read_headers(headers_for(lib), HEADER_PREFIXES, every)
    untyped = sorted({*described.functions} - TYPED_NAMES - {*without})
    # One file cannot both include the headers and define all functions without types.
    plain = "".join(f"long {name}(void) {{ return 0; }}\n" for name in untyped)
    compiled_with = include
    if fields_in_library:
        compiled_with = folder / "other"
        shutil.copytree(include, compiled_with)
        other = text.replace(PARAMETERS, PARAMETERS + fields_in_library)
        (compiled_with / "llama.h").write_text(other)
    compile_library(plain, lib / "libggml.so")
    compile_library(TYPED, lib / "libllama.so", linked=(lib / "libggml.so",), include=compiled_with)
    return lib


def in_process(lib: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the llama.cpp in `lib`, in a separate process."""
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(lib)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def answer(lib: Path, code: str) -> object:
    done = in_process(lib, f"import json\n{code}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub(tmp_path_factory.mktemp("1.0"))


def test_the_function_names_of_1_0_are_found_and_disable_no_capability(new: Path) -> None:
    lacks = answer(
        new,
        "from localllm_backends.llamacpp.native import start_native\n"
        "llama = start_native()\n"
        "assert llama.version() == 'llama 1.0.0'\n"
        "print(json.dumps({n: w for n, w in llama.capabilities().items() if w}))",
    )
    assert isinstance(lacks, dict)
    assert set(lacks) <= {"rpc", "fp8_kv", "images", "audio"}, lacks


def test_fields_are_set_by_name_wherever_a_release_has_them(new: Path) -> None:
    found = answer(
        new,
        "from localllm_backends.llamacpp.context import made_context\n"
        "from localllm_backends.llamacpp.native import start_native\n"
        "llama = start_native()\n"
        "context = made_context(None, n_ctx=4096, n_seq_max=7, moe_cache_size=5, not_there=1)\n"
        "print(json.dumps([llama.llama_n_ctx(context), llama.llama_n_seq_max(context)]))",
    )
    assert found == [4096, 7]


@pytest.mark.parametrize(
    ("function", "off"),
    [
        ("llama_set_embeddings_nextn", {"mtp", "drafters"}),
        ("llama_set_embeddings_layer_inp", {"drafters"}),
        ("llama_set_nextn_layer_offset", {"mtp"}),
        ("llama_adapter_lora_init", {"adapters"}),
        ("llama_state_seq_get_data_ext", {"states"}),
    ],
)
def test_a_missing_function_disables_only_its_capability_and_doctor_names_it(
    tmp_path: Path, function: str, off: set[str]
) -> None:
    lib = stub(tmp_path, without=[function])
    build = query_build({**os.environ, "LLAMA_CPP_LIB_PATH": str(lib)})
    assert build.failure == ""
    assert ggml.read(ggml.to_json(build)) == build
    of_build = ("rpc", "fp8_kv", "images", "audio")
    lacks = {name: why for name, why in build.lacks.items() if name not in of_build}
    assert set(lacks) == off
    checks = health_checks(identify(recordings.load("cpu_only_vm")), HealthFacts(llama_cpp=build))
    told = [check for check in checks if function in check.message]
    assert len(told) == len(off)
    assert all(check.status == "warning" and str(lib) in check.message for check in told)


def test_a_missing_decode_function_is_named_in_one_sentence(tmp_path: Path) -> None:
    lib = stub(tmp_path, without=["llama_decode"])
    done = in_process(lib, START)
    assert done.stdout.splitlines() == [
        f"this llama.cpp (llama 1.0.0) can't be used: {lib / 'libllama.so'} exports no function "
        "llama_decode"
    ]


START = """
from localllm_backends.contract import UnusableEngineError
from localllm_backends.llamacpp.native import start_native
try:
    start_native()
except UnusableEngineError as e:
    print(e)
"""


@pytest.mark.parametrize(
    "fields",
    ["size_t first; size_t second;", "int32_t one;", "bool flag; void * data;", "float a, b, c;"],
)
def test_a_different_struct_layout_is_reported_in_one_sentence_with_file_and_version(
    tmp_path: Path, fields: str
) -> None:
    lib = stub(tmp_path, fields_in_library=fields)
    done = in_process(lib, START)
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert sentence.startswith(f"{lib / 'libllama.so'} (llama 1.0.0) does not match its headers: ")
    assert "llama_context_default_params returns" in sentence


def test_a_wrong_layout_ends_a_command_with_its_exit_code(tmp_path: Path) -> None:
    lib = stub(tmp_path, fields_in_library="size_t first; size_t second;")
    done = chat(lib, tmp_path)
    assert done.returncode == 6
    assert "does not match its headers" in done.stderr
    assert f"put the headers of the same release into {lib / 'include'}" in done.stderr


def test_a_library_that_cannot_be_loaded_gives_the_loaders_own_words(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libllama.so").write_bytes(b"\x7fELF and no more")
    done = chat(lib, tmp_path)
    assert done.returncode == 6
    assert f"llama.cpp's library {lib / 'libllama.so'} can't be loaded: " in done.stderr
    assert "file too short" in done.stderr
    assert "unset LLAMA_CPP_LIB_PATH" in done.stderr
    assert "may be damaged" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="its libraries name the folder of their own")
def test_libraries_that_do_not_search_their_own_folder_are_loaded_from_it(tmp_path: Path) -> None:
    installed = library_folder()
    assert installed is not None
    lib = tmp_path / "lib"
    shutil.copytree(installed, lib, symlinks=True)
    shutil.copytree(include_folder(), tmp_path / "include")
    for file in lib.glob("*.so*"):
        if not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(b"$ORIGIN", b"/absent"))
    done = chat(lib, tmp_path)
    assert done.returncode == 0, done.stderr


def chat(lib: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Answer one message with a tiny model and the llama.cpp in `lib`."""
    model = tiny_gguf.write_llama(folder / "model.gguf")
    return subprocess.run(
        [sys.executable, "-m", "localllm", "chat", "-m", str(model)],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(lib)},
        input="hello",
        capture_output=True,
        text=True,
        check=False,
    )
