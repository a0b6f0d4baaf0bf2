"""Finds a model by the name that a user typed: on the command line, in a request, in a chat.

Each place that takes names states which models answer to a name by which rule. `find` applies the
rules in the order of `Rule`, so that a name means the same model in every place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

Model = TypeVar("Model")

# Ollama's default tag, which its clients add to names.
_TAG = ":latest"


class Rule(IntEnum):
    """A way in which a name leads to a model. The order of the members is the order of precedence.

    SERVED: an id or alias in a server's list of models, or a preset of config.toml.
    PATH: a file or folder on this disk. Only the command line has this rule.
    UPSTREAM: the name of a model on another server.
    INSTALLED: the name of an installed model or of its file, or NAME:QUANT, or REPOSITORY:QUANT.
    PART: a repository, or a name without publisher, quant and punctuation; either with :QUANT.
    CATALOG: an id of the catalog, with :QUANT, or in Ollama's notation (qwen3:8b).
    PATTERN: an alias with wildcards. Only requests have this rule."""

    SERVED = auto()
    PATH = auto()
    UPSTREAM = auto()
    INSTALLED = auto()
    PART = auto()
    CATALOG = auto()
    PATTERN = auto()


# For each rule that a place has, the models that a typed name leads to, the best one first.
Rules = Mapping[Rule, Callable[[str], Sequence[Model]]]


@dataclass(frozen=True, slots=True)
class NameMatch(Generic[Model]):
    """The models that a name leads to, the best one first, and the rule that found them."""

    models: Sequence[Model] = ()
    rule: Rule | None = None

    @property
    def first(self) -> Model | None:
        return self.models[0] if self.models else None


def find(typed: str, rules: Rules[Model]) -> NameMatch[Model]:
    """Return the models that `typed` names by the first rule, in the order of `Rule`, that finds
    any; an empty NameMatch if none does."""
    typed = typed.strip()
    for rule in sorted(rules):
        models = rules[rule](typed)
        if models:
            return NameMatch(models, rule)
    return NameMatch()


def without_tag(name: str) -> str:
    """Return `name` without Ollama's default tag: `NAME:latest` is `NAME`."""
    if name.lower().endswith(_TAG):
        return name[: -len(_TAG)]
    return name


class NameTable(Generic[Model]):
    """Models by their full names. Case is ignored. `NAME:latest` and `NAME` are one name, unless
    different models have these two names."""

    def __init__(self, named: Iterable[tuple[str, Model]] = ()) -> None:
        self._names: dict[str, list[Model]] = {}
        self._patterns: dict[str, Model] = {}
        for name, model in named:
            self.add(name, model)

    def add(self, name: str, model: Model) -> Sequence[Model]:
        """Add a name of `model`; returns all models of this name, the first one first."""
        models = self._names.setdefault(name.lower(), [])
        if model not in models:
            models.append(model)
        return models

    def add_alias(self, alias: str, model: Model) -> Sequence[Model]:
        """Add a name that may hold wildcards (`*` and `?`); returns as `add` does."""
        if "*" in alias or "?" in alias:
            return [self._patterns.setdefault(alias.lower(), model)]
        return self.add(alias, model)

    def items(self) -> Iterable[tuple[str, Model]]:
        """Every name without wildcards, in lower case, with the first model that has it."""
        for name, models in self._names.items():
            yield name, models[0]

    def named(self, typed: str) -> Sequence[Model]:
        """The models of this name."""
        name = typed.lower()
        short = without_tag(name)
        for spelling in (name, short, short + _TAG):
            if spelling in self._names:
                return self._names[spelling]
        return ()

    def by_pattern(self, typed: str) -> Sequence[Model]:
        """The model of the pattern that matches this name; of several patterns, the one with the
        most characters that are no wildcards."""
        name = without_tag(typed.lower())
        matching = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        if not matching:
            return ()
        return [self._patterns[max(matching, key=_literal_characters)]]


def _literal_characters(pattern: str) -> int:
    return len(pattern) - pattern.count("*") - pattern.count("?")
