"""llama.cpp's loaded libraries: functions, structures, types and constants under llama.cpp's own
names."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm_backends.contract import UnusableEngineError
from localllm_backends.llamacpp.binding.c_types import CTypes
from localllm_backends.llamacpp.binding.descriptions import Description
from localllm_backends.llamacpp.binding.engine_files import (
    OTHER_FOLDER,
    headers_for,
    library_folder,
    library_in,
)
from localllm_backends.llamacpp.binding.requirements import CAPABILITIES, Capability, wanted

# Libraries that are searched in addition to libllama. A library's handle also finds the symbols of
# the libraries that it is linked to, but not on Windows.
_GGML = ("ggml", "ggml-base", "ggml-cpu")
_FP8 = re.compile(r"GGML_TYPE_FP?8_")


class Library:
    """The libraries in `folder`. An attribute is made when it is first used.

    An attribute that the headers do not declare, or that no library exports, raises AttributeError
    with a sentence that names both.
    """

    def __init__(
        self, folder: Path, file: Path, headers: list[Path], described: Description
    ) -> None:
        self.folder = folder
        self.file = file
        self.headers = headers
        self._described = described
        self._cached = CTypes(described.structures)
        self._handles = {"llama": load_shared(file)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._find(name)
        # An attribute of the instance is found without this method.
        setattr(self, name, value)
        return value

    def _find(self, name: str) -> Any:
        described = self._described
        if name in described.functions:
            return self._function(name)
        if name in described.constants:
            return described.constants[name]
        if name in described.structures:
            return self._cached.structure(name)
        if name in described.types:
            return self._cached.of(described.types[name])
        raise AttributeError(f"{self.headers[0]} declares no {name}")

    def _function(self, name: str) -> Any:
        result, arguments, spellings = self._described.functions[name]
        for library in self._libraries_of(name):
            for spelling in spellings:
                # Each access by a key makes a new object, so that types are set for this one only.
                if hasattr(library, spelling):
                    function = library[spelling]
                    function.restype = self._cached.of(result)
                    function.argtypes = [self._cached.of(kind) for kind in arguments]
                    return function
        raise AttributeError(f"{self.file} exports no {name}")

    def _libraries_of(self, function: str) -> Iterator[Any]:
        """Yield the libraries that may export a function, loaded."""
        if function.startswith("mtmd_"):
            names = ["mtmd"]
        elif function.startswith("ggml_backend_rpc_"):
            names = ["ggml-rpc"]
        else:
            names = ["llama", *_GGML]
        for name in names:
            if name not in self._handles:
                path = library_in(self.folder, name)
                self._handles[name] = None if path is None else load_shared(path)
            if self._handles[name] is not None:
                yield self._handles[name]

    def retyped(self, name: str, result: Any, *arguments: Any) -> Any:
        """Return the function `name` with other types of result and arguments."""
        function = self._function(name)
        function.restype = result
        function.argtypes = arguments
        return function

    def padded(self, structure: str, padding_bytes: int) -> Any:
        """Return a class of a structure with more bytes at its end."""
        return self._cached.padded(structure, padding_bytes)

    def has(self, *names: str) -> bool:
        """Return whether all functions, structures, types or constants exist."""
        return all(hasattr(self, name) for name in names)

    def has_field(self, structure: str, field: str) -> bool:
        fields = self._described.structures.get(structure, ())
        return any(name == field for name, _ in fields)

    def field_type(self, structure: str, field: str) -> Any:
        """Return the type of a field, such as a callback."""
        kinds = dict(self._cached.structure(structure)._fields_)
        return kinds[field]

    def kinds_of(self, structure: str) -> list[tuple[str, Any]]:
        """Return name and described type of each field."""
        return [(name, kind) for name, kind in self._described.structures.get(structure, ())]

    def constants(self, prefix: str) -> dict[str, int]:
        """Return the constants whose names start with `prefix`, by the rest of their names."""
        found = self._described.constants.items()
        return {name.removeprefix(prefix): n for name, n in found if name.startswith(prefix)}

    def set_fields(self, parameters: Any, **values: Any) -> None:
        """Set the fields that this library's structure has. The others are left out."""
        name = type(parameters).__name__
        for field, value in values.items():
            if self.has_field(name, field):
                setattr(parameters, field, value)

    # --- capabilities -----------------------------------------------------------------------------

    def missing(self, name: str) -> str:
        """Return the first part that a capability lacks, and the file that lacks it; "" if it has
        all."""
        capability = CAPABILITIES[name]
        if capability.library != "llama" and library_in(self.folder, capability.library) is None:
            return f"there is no library {capability.library} in {self.folder}"
        for function in (*capability.functions, *capability.staging):
            if not self.has(function):
                return self._why_missing(capability, function)
        for name in (*capability.structures, *capability.types, *capability.constants):
            if not self.has(name):
                return f"{self.headers[0]} declares no {name}"
        for field in capability.fields:
            if not self.has_field(*field.split(".")):
                return f"{self.headers[0]} declares no field {field}"
        return ""

    def _why_missing(self, capability: Capability, function: str) -> str:
        if function not in self._described.functions:
            return f"{self.headers[0]} declares no function {function}"
        file = library_in(self.folder, capability.library) or self.file
        return f"{file} exports no function {function}"

    def capabilities(self) -> dict[str, str]:
        """Return the missing part of every capability by its name ("" = it is complete)."""
        found = {name: self.missing(name) for name in CAPABILITIES}
        found["fp8_kv"] = ""
        if not any(map(_FP8.match, self._described.constants)):
            found["fp8_kv"] = f"{self.headers[0]} declares no FP8 type"
        return found

    def version(self) -> str:
        """Return the library's version as far as it is known, for messages."""
        for function in ("llama_version", "ggml_version"):
            if self.has(function):
                text = getattr(self, function)().decode("utf-8", "replace")
                return f"{function.partition('_')[0]} {text}"
        return "unknown version"


def open_library() -> Library:
    """Load the llama.cpp in use and read its headers.

    Raises ModuleNotFoundError if it is not installed, and UnusableEngineError if it can't be used.
    """
    from localllm_backends.llamacpp.binding.descriptions import HeaderError
    from localllm_backends.llamacpp.binding.kept_description import description_of

    folder = library_folder()
    if folder is None:
        raise ModuleNotFoundError("llama-cpp-python is not installed", name="llama_cpp")
    file = library_in(folder, "llama")
    if file is None:
        raise UnusableEngineError(f"there is no library of llama.cpp in {folder}", _load_hint())
    headers = headers_for(folder)
    if not headers:
        raise UnusableEngineError(
            f"no llama.h belongs to {file}: put the headers of the same release into "
            f"{folder / 'include'}",
            _load_hint(),
        )
    try:
        described = description_of(file, headers, wanted())
    except (OSError, HeaderError) as e:
        raise UnusableEngineError(f"the headers of {file} can't be read: {e}", _load_hint()) from e
    return Library(folder, file, headers, described)


def load_shared(file: Path, loaded: tuple[Path, ...] = ()) -> Any:
    """Load a shared library. Raises UnusableEngineError with the loader's own words.

    If it needs another one that the loader does not find but that is in the same folder, that one
    is loaded first, for example if a Debian package was unpacked there. `loaded` are those so far.
    """
    if sys.platform == "win32":
        folders = [file.parent]
        for variable in ("CUDA_PATH", "HIP_PATH"):
            toolkit = os.environ.get(variable)
            if toolkit:
                folders += [Path(toolkit, "bin"), Path(toolkit, "lib")]
        for folder in folders:
            if folder.is_dir():
                os.add_dll_directory(str(folder))
    try:
        if sys.platform == "win32":
            # Search the folders of PATH too, where a toolkit may be.
            return ctypes.CDLL(str(file), winmode=0)
        return ctypes.CDLL(str(file))
    except OSError as e:
        # "libggml.so.0: cannot open shared object file: …"
        needed = file.parent / str(e).partition(":")[0]
        if needed != file and needed.is_file() and needed not in loaded:
            load_shared(needed, (*loaded, needed))
            return load_shared(file, (*loaded, needed))
        raise UnusableEngineError(
            f"llama.cpp's library {file} can't be loaded: {e}", _load_hint()
        ) from e


def _load_hint() -> str:
    if os.environ.get(OTHER_FOLDER):
        return f"unset {OTHER_FOLDER} to use the llama.cpp that was installed with localllm"
    return "localllm setup"
