"""Bindings generated from llama.cpp's headers: the same types as llama-cpp-python's handwritten
ones, for all names that the package uses, and cached on disk."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp, mtmd_cpp

from localllm_backends.contract import BackendFailure, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type, binding
from localllm_backends.llamacpp.binding.c_headers import read_headers
from localllm_backends.llamacpp.binding.c_types import CTypes
from localllm_backends.llamacpp.binding.descriptions import Description, HeaderError, WantedNames
from localllm_backends.llamacpp.binding.engine_files import (
    file_identity,
    headers_for,
    libraries_in,
    library_folder,
    library_in,
)
from localllm_backends.llamacpp.binding.kept_description import description_of
from localllm_backends.llamacpp.binding.requirements import CAPABILITIES, wanted
from localllm_backends.llamacpp.native import start_native
from models import tiny_gguf
from support.native_library import include_folder

SOURCES = sorted(Path(binding.__file__).parents[1].glob("*.py"))
# Parts of the names of llama.cpp's functions, types and constants.
NATIVE = re.compile(r"(llama|ggml|gguf|mtmd)_[a-z0-9_]+|(LLAMA|GGML|GGUF|MTMD)_[A-Z0-9_]+")


def names_in(path: Path) -> set[str]:
    """Return the llama.cpp names that a module uses from the library."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and NATIVE.fullmatch(node.attr):
            found.add(node.attr)
    return found


def test_every_name_that_a_module_uses_is_in_the_table() -> None:
    known = wanted()
    listed = {*known.functions, *known.structures, *known.types, *known.constants}
    prefixes = tuple(name[:-1] for name in listed if name.endswith("*"))
    for path in SOURCES:
        # A module's name may equal the first word of a function's name.
        used = {n for n in names_in(path) if not n.startswith(prefixes)} - {"ggml_type"}
        assert not used - listed - _by_value(), path.name


def _by_value() -> set[str]:
    """Structures that are described because a function takes or returns them."""
    return {"ggml_backend_dev_caps", "mtmd_context_params"}


def test_every_function_in_the_table_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    text += Path(binding.__file__).with_name("library.py").read_text(encoding="utf-8")
    text += Path(binding.__file__).with_name("layout.py").read_text(encoding="utf-8")
    # Families of functions that are selected by a part of the name.
    for name in wanted().functions:
        family = re.match(
            r"llama_vocab_(fim_\w+|bos|eos)|gguf_get_\w+|llama_version|ggml_version", name
        )
        assert family or name in text, f"no module uses {name}"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (llama_cpp, "llama_batch"),
        (llama_cpp, "llama_model_params"),
        (llama_cpp, "llama_context_params"),
        (llama_cpp, "llama_sampler_chain_params"),
        (llama_cpp, "llama_sampler_i"),
        (llama_cpp, "llama_sampler_data"),
        (mtmd_cpp, "mtmd_context_params"),
        (mtmd_cpp, "mtmd_input_text"),
        (mtmd_cpp, "mtmd_input_part"),
        (mtmd_cpp, "mtmd_decoder_pos"),
    ],
)
def test_structures_are_those_of_llama_cpp_python(module: Any, name: str) -> None:
    ours, theirs = getattr(start_native(), name), getattr(module, name)
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
    for field, _ in start_native().kinds_of(name):
        places = [getattr(structure, field) for structure in (ours, theirs)]
        assert len({(place.offset, place.size) for place in places}) == 1, field


def test_functions_have_the_types_of_llama_cpp_python() -> None:
    llama, compared = start_native(), 0

    def shape(kind: Any) -> Any:
        """Return the size and kind of a value, ignoring the target type of a pointer."""
        if kind is None or kind is ctypes.c_bool or not isinstance(kind, type):
            return kind
        if kind in (ctypes.c_float, ctypes.c_double):
            return kind
        if issubclass(kind, ctypes.Structure):
            return kind.__name__
        return ctypes.sizeof(kind)

    for name in wanted().functions:
        theirs = getattr(llama_cpp, name, None) or getattr(mtmd_cpp, name, None)
        if theirs is None or not hasattr(theirs, "argtypes") or theirs.argtypes is None:
            continue
        ours = getattr(llama, name)
        assert shape(ours.restype) == shape(theirs.restype), name
        assert [*map(shape, ours.argtypes)] == [*map(shape, theirs.argtypes)], name
        compared += 1
    assert compared > 100


def test_constants_are_those_of_llama_cpp_python() -> None:
    for name in ("LLAMA_CONTEXT_TYPE_MTP", "LLAMA_TOKEN_ATTR_LSTRIP", "LLAMA_POOLING_TYPE_RANK"):
        assert getattr(start_native(), name) == getattr(llama_cpp, name)
    assert start_native().LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY == 1
    assert (start_native().GGML_TYPE_F16, start_native().GGML_TYPE_Q8_0) == (1, 8)


def test_the_installed_library_lacks_only_functions_disabled_at_build_time() -> None:
    lacks = {name for name, why in start_native().capabilities().items() if why}
    assert lacks <= {"rpc", "expert_cache", "fp8_kv", "images", "audio"}
    assert set(CAPABILITIES) > lacks - {"fp8_kv"}


@pytest.mark.parametrize("kind", ["llama", "sliding", "hybrid"])
def test_a_library_without_sequence_states_still_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = start_native()
    real = llama.missing

    def missing(name: str) -> str:
        return "it exports no such function" if name == "states" else real(name)

    monkeypatch.setattr(llama, "missing", missing)
    path = getattr(tiny_gguf, f"write_{kind}")(tmp_path / "model.gguf")
    backend = backend_type.load(LoadSpec(str(path), n_ctx=256, n_seq_max=2, n_threads=1))
    able = backend.capabilities
    assert (able.segments, able.states, able.sliced_prefill) == (False, False, False)
    sequence = backend.new_sequence()
    assert backend.step([Chunk(sequence, [5, 6, 7])]).logits(0).shape[0] == 1
    with pytest.raises(BackendFailure):
        backend.export_range(sequence, 0, 3)
    backend.check_integrity()
    backend.close()


# --- cached descriptions --------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the installed libllama and its headers to a folder of their own."""
    folder = library_folder()
    assert folder is not None
    library = library_in(folder, "llama")
    assert library is not None
    lib = tmp_path / "engine" / "lib"
    lib.mkdir(parents=True)
    shutil.copy(library, lib)
    include = lib.parent / "include"
    include.mkdir()
    for header in include_folder().glob("*.h"):
        shutil.copy(header, include)
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(tmp_path / "cache"))
    return lib


def described(lib: Path) -> Description:
    library = library_in(lib, "llama")
    assert library is not None
    return description_of(library, headers_for(lib), wanted())


def test_headers_are_read_once(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = described(engine)
    (kept,) = (engine.parent / "include").glob("*.json")
    monkeypatch.setattr("localllm_backends.llamacpp.binding.c_headers.read_headers", None)
    assert described(engine) == made
    # A truncated file or one of another version is generated anew.
    kept.write_text("{")
    with pytest.raises(TypeError):
        described(engine)
    monkeypatch.undo()
    assert described(engine) == made
    json.loads(kept.read_text())


def test_changed_headers_or_another_library_are_read_again(engine: Path) -> None:
    before = described(engine)
    header = engine.parent / "include" / "llama.h"
    header.write_text(
        header.read_text().replace(
            "struct llama_context_params {", "struct llama_context_params {\n int32_t first;"
        )
    )
    after = described(engine)
    assert before.structures["llama_context_params"] == after.structures["llama_context_params"][1:]
    assert len([*(engine.parent / "include").glob("*.json")]) == 2


def test_an_unwritable_cache_folder_causes_no_error(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tempfile.mkstemp

    def refused(**place: Any) -> tuple[int, str]:
        if place["dir"].name == "include":
            raise PermissionError(place["dir"])
        return real(**place)

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    described(engine)
    assert not [*(engine.parent / "include").glob("*.json")]
    assert len([*(tmp_path / "cache" / "bindings").iterdir()]) == 1


# --- headers --------------------------------------------------------------------------------------


def read(tmp_path: Path, text: str, **names: tuple[str, ...]) -> Description:
    header = tmp_path / "llama.h"
    header.write_text(text)
    kinds = ("functions", "staging", "structures", "types", "constants")
    return read_headers([header], ("llama",), WantedNames(**{k: names.get(k, ()) for k in kinds}))


def test_declarations_of_every_kind_are_described(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        #include <stdint.h>
        #define LLAMA_LIMIT 0x10u
        typedef struct llama_x llama_x;
        typedef int32_t llama_id;
        enum llama_kind { LLAMA_A = -1, LLAMA_B, LLAMA_C = (1 << 3) | LLAMA_B };
        typedef bool (*llama_asks)(struct llama_x * x, float part, void * data);
        struct llama_part { llama_id ids[LLAMA_C]; enum llama_kind kind; };
        struct llama_fact { int tag; union { int64_t n; char text[8]; }; };
        struct llama_all { struct llama_part part; llama_asks asks; const char * const * texts; };
        union llama_either { int a; float b; };
        LLAMA_API void llama_set(llama_x * x, struct llama_all all, double v[], size_t * n);
        const char * llama_text(const struct llama_x * x);
        void llama_takes(union llama_either either);
        """.replace("LLAMA_API", ""),
        functions=("llama_*",),
        structures=("llama_part", "llama_fact"),
        types=("llama_id", "llama_asks"),
        constants=("LLAMA_*",),
    )
    asks = ["callback", "bool", ["address", "float", "address"]]
    assert found.functions == {
        "llama_set": [
            "void",
            ["address", ["structure", "llama_all"], ["pointer", "double"], ["pointer", "size_t"]],
            ["llama_set"],
        ],
        "llama_text": ["text", ["address"], ["llama_text"]],
    }, "a type that can't be described costs one function"
    assert found.structures == {
        "llama_part": [["ids", ["array", "int32_t", 8]], ["kind", "enum"]],
        "llama_all": [
            ["part", ["structure", "llama_part"]],
            ["asks", asks],
            ["texts", ["pointer", "text"]],
        ],
        "llama_fact": [
            ["tag", "int"],
            [None, ["union", [["n", "int64_t"], ["text", ["array", "char", 8]]]]],
        ],
    }
    fact = CTypes(found.structures).structure("llama_fact")
    assert (fact.n.offset, fact.text.offset, ctypes.sizeof(fact)) == (8, 8, 16)
    assert found.types == {"llama_id": "int32_t", "llama_asks": asks}
    assert found.constants == {"LLAMA_A": -1, "LLAMA_B": 0, "LLAMA_C": 8, "LLAMA_LIMIT": 16}


def test_an_invalid_header_is_an_error_with_its_position(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"llama\.h:2"):
        read(tmp_path, "int a;\nclass b : c {};\n")


def test_former_cxx_functions_have_the_mangled_names_of_both_compilers(tmp_path: Path) -> None:
    """The names equal those that llama-cpp-python lists and those that a compiler generates."""
    staging = Path(binding.__file__).with_name("staging.h")
    names = tuple(re.findall(r"\b(llama_\w+)\s*\(", staging.read_text()))
    found = read(tmp_path, staging.read_text(), functions=names, staging=names)
    spellings = {name: function[2] for name, function in found.functions.items()}
    assert len(spellings) == 5
    theirs = Path(llama_cpp.__file__).with_name("llama_cpp_ext.py").read_text()
    listed = set(re.findall(r'"([^"]*(?:nextn|layer_inp)[^"]*)"', theirs))
    for plain, itanium, microsoft in spellings.values():
        if plain in listed:
            assert {itanium, microsoft} <= listed
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    code = tmp_path / "names.cpp"
    bodies = re.sub(r"\);", ") { throw 0; }", staging.read_text())
    code.write_text(f"#include <cstdint>\nstruct llama_context;\n{bodies}")
    subprocess.run([compiler, "-c", "-o", str(tmp_path / "names.o"), str(code)], check=True)
    exported = subprocess.run(
        ["nm", str(tmp_path / "names.o")], check=True, capture_output=True, text=True
    ).stdout.split()
    assert {itanium for _, itanium, _ in spellings.values()} <= set(exported)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["lib/../include", "lib/include", "lib/../../include"])
def test_headers_are_found_in_the_folders_of_common_installations(
    tmp_path: Path, place: str
) -> None:
    lib = tmp_path / "prefix" / "lib"
    lib.mkdir(parents=True)
    include = tmp_path / "prefix" / place
    include.mkdir(parents=True)
    for name in ("llama.h", "ggml.h"):
        (include / name).touch()
    assert [path.name for path in headers_for(lib)] == ["llama.h", "ggml.h"]
    assert headers_for(lib)[0].parent == include.resolve()


def test_headers_of_a_build_in_llama_cpps_source_are_found(tmp_path: Path) -> None:
    for name in ("include/llama.h", "ggml/include/ggml.h", "tools/mtmd/mtmd.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    lib = tmp_path / "build" / "bin"
    lib.mkdir(parents=True)
    assert [path.name for path in headers_for(lib)] == ["llama.h", "ggml.h", "mtmd.h"]


def test_each_library_is_found_once_with_or_without_versions(tmp_path: Path) -> None:
    for name in (
        "libllama.so",
        "libllama.so.0",
        "libggml.so.0.1",
        "libggml-cpu-haswell.so",
        "libssl.so",
        "x.json",
    ):
        (tmp_path / name).touch()
    found = [path.name for path in libraries_in(tmp_path)]
    assert found == ["libggml.so.0.1", "libggml-cpu-haswell.so", "libllama.so"]


def test_a_small_library_with_another_byte_anywhere_has_another_identity(tmp_path: Path) -> None:
    names = []
    for at in (0, 1_340_000, 2_000_000):
        library = tmp_path / f"libllama.so.{at}"
        content = bytearray(3_000_000)
        content[at] = 1
        library.write_bytes(content)
        names.append(file_identity(library))
    assert len(set(names)) == 3
    huge = tmp_path / "libggml-cuda.so"
    huge.touch()
    os.truncate(huge, 2**30)
    assert file_identity(huge) not in names
