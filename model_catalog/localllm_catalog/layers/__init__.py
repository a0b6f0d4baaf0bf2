"""The kinds of layers, one file each: what a layer of the kind remembers, reads and weighs, and how
it is read from a GGUF header, a config.json and a family file.

A new kind is one file in this package: a subclass of `mixer.Mixer` under `@mixer.register`.
"""

from __future__ import annotations

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
