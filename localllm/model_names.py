"""Find a model by the name that a user typed: on the command line, in a request, in a chat.

Each place that takes names provides one lookup function for each `Rule` that it supports. `find`
applies the rules in the order of `Rule`, so a name means the same model in every place.
"""

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
    """A way in which a name leads to a model, in order of precedence.

    SERVED: an id or alias in a server's list of models, or a preset of config.toml.
    PATH: a file or folder on this disk. Only the command line has this rule.
    UPSTREAM: the name of a model on another server.
    INSTALLED: the name of an installed model or of its file, or NAME:QUANT, or REPOSITORY:QUANT.
    PART: a repository, or a name without publisher, quant and punctuation; either with :QUANT.
    CATALOG: an id of the catalog, with :QUANT, or as Ollama writes it (qwen3:8b).
    PATTERN: an alias with wildcards. Only requests have this rule.
    """

    SERVED = auto()
    PATH = auto()
    UPSTREAM = auto()
    INSTALLED = auto()
    PART = auto()
    CATALOG = auto()
    PATTERN = auto()


# For each supported rule, a function that returns the models of a typed name, best first.
Rules = Mapping[Rule, Callable[[str], Sequence[Model]]]


@dataclass(frozen=True, slots=True)
class NameMatch(Generic[Model]):
    """The models that a name leads to, best first, and the rule that found them."""

    models: Sequence[Model] = ()
    rule: Rule | None = None

    @property
    def first(self) -> Model | None:
        return self.models[0] if self.models else None


def find(typed: str, rules: Rules[Model]) -> NameMatch[Model]:
    """Return the models that the first matching rule finds for `typed`, in the order of `Rule`.

    Returns an empty NameMatch if no rule matches.
    """
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
    """Models by their full names, ignoring case.

    `NAME:latest` and `NAME` are the same name, unless both names were added for different models.
    """

    def __init__(self, named: Iterable[tuple[str, Model]] = ()) -> None:
        self._names: dict[str, list[Model]] = {}
        self._patterns: dict[str, Model] = {}
        for name, model in named:
            self.add(name, model)

    def add(self, name: str, model: Model) -> Sequence[Model]:
        """Add a name of `model`. Returns all models of this name in the order they were added."""
        models = self._names.setdefault(name.lower(), [])
        if model not in models:
            models.append(model)
        return models

    def add_alias(self, alias: str, model: Model) -> Sequence[Model]:
        """Add a name that may contain wildcards (`*` and `?`). Returns the same as `add`."""
        if "*" in alias or "?" in alias:
            return [self._patterns.setdefault(alias.lower(), model)]
        return self.add(alias, model)

    def items(self) -> Iterable[tuple[str, Model]]:
        """Yield every name without wildcards, in lower case, with the first model of that name."""
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
        """The model of the pattern that matches `typed`. If several match, the one with the most
        literal characters wins."""
        name = without_tag(typed.lower())
        matching = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        if not matching:
            return ()
        return [self._patterns[max(matching, key=_literal_characters)]]


def _literal_characters(pattern: str) -> int:
    return len(pattern) - pattern.count("*") - pattern.count("?")
