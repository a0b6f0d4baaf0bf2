"""Rules that match a typed name to installed models, and the errors for names without a match."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from localllm.errors import ModelNotFoundError
from localllm.library import names, ollama_names, starter, store
from localllm.library.catalog import load_catalog
from localllm.library.types import LocalModel
from localllm.model_names import NameTable, Rule, Rules

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model


class InstalledNames:
    """The names of `installed` models (None: all models on this disk, also those cut short).

    The rules never look at a path, download or raise errors, so names from untrusted clients are
    safe. The disk and the catalog are read when a rule first needs them.
    """

    def __init__(
        self, installed: Sequence[LocalModel] | None = None, catalog: Catalog | None = None
    ) -> None:
        self._given_models = installed
        self._given_catalog = catalog

    @cached_property
    def models(self) -> Sequence[LocalModel]:
        if self._given_models is None:
            return store.everything()
        return self._given_models

    @cached_property
    def catalog(self) -> Catalog:
        if self._given_catalog is None:
            return load_catalog()
        return self._given_catalog

    @property
    def rules(self) -> Rules[LocalModel]:
        """The rules for `localllm.model_names.find`."""
        return {
            Rule.INSTALLED: self._by_name,
            Rule.PART: self._by_part,
            Rule.CATALOG: self._by_catalog,
        }

    def catalog_id(self, typed: str) -> str:
        """The id of the catalog model that `typed` names, or ""."""
        model, _ = self._entry(typed)
        return model.id if model is not None else ""

    def not_found(self, typed: str) -> ModelNotFoundError:
        """The error for a name without an installed model.

        Raises UsageError if `typed` can't be a name, and ModelNotFoundError if the catalog model
        has no such quant.
        """
        reference = names.parse(typed)
        if reference.repo:
            return self._not_installed(reference, self.catalog.recognise(reference.repo))
        model, quant = catalog_model(typed, self.catalog)
        if model is not None:
            names.check_quant(model, quant)
            return self._not_installed(reference, model)
        closest = ", ".join(self._closest(reference.name))
        if closest:
            hint = f"did you mean {closest}?"
        else:
            hint = (
                "see `localllm models list` for installed models and `localllm recommend` for "
                "models to download"
            )
        return ModelNotFoundError(f"no model is called {reference.text!r}", hint=hint)

    @cached_property
    def _table(self) -> NameTable[LocalModel]:
        table: NameTable[LocalModel] = NameTable()
        for model in self.models:
            for name in _full_names(model):
                table.add(name, model)
        return table

    def _by_name(self, typed: str) -> Sequence[LocalModel]:
        return self._table.named(typed)

    def _by_part(self, typed: str) -> Sequence[LocalModel]:
        reference = names.parsed(typed)
        if reference is None:
            return ()
        if reference.repo:
            return self._of_repository(reference)
        wanted = names.bare(reference.name)
        if not wanted:
            return ()
        # "Tiny-Q8_0" matches no other quant, like "tiny:Q8_0".
        quant = reference.quant or names.quant_of(reference.name)
        return [m for m in self._of_quant(quant) if wanted in _bare_names(m)]

    def _of_repository(self, reference: names.ModelReference) -> list[LocalModel]:
        repo = reference.repo.lower()
        found = [m for m in self._of_quant(reference.quant) if m.repo.lower() == repo]
        if not reference.file:
            return found
        stem = names.stem_of(reference.file)
        return [m for m in found if names.stem_of(m.path.name) == stem]

    def _by_catalog(self, typed: str) -> Sequence[LocalModel]:
        model, quant = self._entry(typed)
        if model is None:
            return ()
        return self._variants_of(model, quant)

    def _entry(self, typed: str) -> tuple[Model | None, str]:
        """The catalog model whose id or own repository is typed, and the quant."""
        reference = names.parsed(typed)
        if reference is None or not reference.repo:
            return catalog_model(typed, self.catalog)
        known = self.catalog.recognise(reference.repo)
        # Another publisher's repository, or a file, matches only itself.
        if reference.file or known is None or known.hf_repo.lower() != reference.repo.lower():
            return None, ""
        return known, reference.quant

    def _variants_of(self, model: Model, quant: str) -> list[LocalModel]:
        """The installed variants of `model`, restricted to `quant` if one is given.

        A variant matches by one of the model's repositories or by its name.
        """
        repos = {variant.repo.lower() for variant in model.variants}
        repos.add(model.hf_repo.lower())
        called = {names.bare(name) for name in (model.id, model.name, model.hf_repo)}
        return [
            m for m in self._of_quant(quant) if m.repo.lower() in repos or called & _bare_names(m)
        ]

    def _of_quant(self, quant: str) -> Sequence[LocalModel]:
        if not quant:
            return self.models
        return [m for m in self.models if names.same_quant(quant, m.quant)]

    def _not_installed(
        self, reference: names.ModelReference, model: Model | None
    ) -> ModelNotFoundError:
        called = reference.repo
        quant = reference.quant
        others: set[str] = set()
        if model is not None:
            called = model.name
            _, quant = self._entry(reference.text)
            others = {m.quant or m.name for m in self._variants_of(model, "")}
        if quant:
            called += f" in {quant}"
        hint = f"download it: `localllm pull {reference.text}`"
        if others:
            hint += f"; installed: {', '.join(sorted(others))}"
        return ModelNotFoundError(f"{called} is not on this disk", hint=hint)

    def _closest(self, name: str) -> list[str]:
        """Catalog ids and installed names with a spelling close to `name`."""
        by_lower = {m.name.lower(): m.name for m in self.models}
        close = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.55)
        matches = [by_lower[key] for key in close]
        return list(dict.fromkeys([*self.catalog.suggest(name), *matches]))


def catalog_model(typed: str, catalog: Catalog) -> tuple[Model | None, str]:
    """The catalog model whose id is typed, or None, and the requested quant.

    Ollama's names are accepted too: `qwen3:8b` is qwen3-8b.
    """
    reference = names.parsed(typed)
    if reference is None or reference.repo:
        return None, ""
    known = catalog.get(reference.name)
    if known is None:
        named = ollama_names.find(reference.name, reference.quant, catalog)
        if named is not None:
            return named
    return known, reference.quant


def _full_names(model: LocalModel) -> list[str]:
    found = [
        model.name,
        model.path.name,
        f"{model.name}.gguf",
        f"{model.name}:{model.quant}",
    ]
    if model.repo:
        found.append(f"{model.repo}:{model.quant}")
    if model.origin == "starter":
        found += starter.NAMES
    return found


def _bare_names(local: LocalModel) -> set[str]:
    return {names.bare(name) for name in (local.name, local.repo, local.path.name)}
