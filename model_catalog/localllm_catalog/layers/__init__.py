"""The kinds of layers, one file each.

Each kind defines a layer's memory, reads and weights. It also reads such a layer from a GGUF
header, a config.json or a family file. To add a kind, add one file to this package with a subclass
of `mixer.Mixer` under `@mixer.register`.
"""

from __future__ import annotations

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
