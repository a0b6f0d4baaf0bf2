"""Translates llguidance's messages about a grammar into our error texts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localllm.errors import UnsupportedError
from localllm.grammars.deep_stack import on_deep_stack

# Cost limits for making a grammar: about a second (llguidance counts its own steps).
_MAX_LEXER_FUEL = 2_000_000
_MAX_GRAMMAR_SIZE = 100_000
_MAX_CHARS = 1000
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_NAMED_KEYWORD = re.compile(r"\bfor '(\$?\w+)'|(\$?\w+) must be an? ")
UNSATISFIABLE = "Unsatisfiable schema"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a grammar is rejected: the schema keywords at fault, if known, and a sentence without a
    full stop."""

    words: tuple[str, ...]
    sentence: str


# Schema keywords named in llguidance's messages (1.9.1, parser/src/json), and the messages that
# name no keyword. The first sign found in a message decides.
_KEYWORD_MESSAGES = {
    "oneOf": ("oneOf is not supported if one value may match several alternatives", "oneOf"),
    "min/maxProperties": (
        "minProperties and maxProperties are not supported together with optional properties",
        "minProperties",
        "maxProperties",
    ),
    "patternProperty": (
        "patternProperties is not supported if one name may match several patterns",
        "patternProperties",
    ),
    "circular references": ("a $ref that refers to itself is not supported", "$ref"),
    "Resource '": ("a $ref to another document is not supported", "$ref"),
    "Pointer '": ("a $ref without a target is not supported", "$ref"),
    "Anchor '": ("a $ref without a target is not supported", "$ref"),
    "regex parse error": ("pattern is not supported in this form", "pattern"),
}
_SIZE_MESSAGES = {
    "recursion limit": "it has more than about 120 nested levels",
    "stack level": "its references have more than 128 nested levels",
    "schema too large": "it has more than 50,000 parts",
    "panic": "it is too large: it has too many rules, or too many alternatives at one position",
}


def reason_of(message: str) -> Reason:
    """The reason for a rejected grammar (from an error) or for ignored keywords (from a
    warning)."""
    # It may contain a name of the schema, or the answer so far.
    message = message[:_MAX_CHARS]
    unknown = _UNKNOWN_KEYWORDS.search(message)
    if unknown is not None:
        words = tuple(re.findall(r'"([^"]+)"', unknown[1]))
        if len(words) > 1:
            return Reason(words, f"{', '.join(words)} are not supported")
        return Reason(words, f"{', '.join(words)} is not supported")
    for excerpt, (sentence, *keywords) in _KEYWORD_MESSAGES.items():
        if excerpt in message:
            return Reason(tuple(keywords), sentence)
    for excerpt, sentence in _SIZE_MESSAGES.items():
        if excerpt in message:
            return Reason((), sentence)
    line = "no reason given"
    if message.strip():
        line = message.strip().splitlines()[0]
    sentence = line.rpartition("failed to compile JSON schema: ")[2]
    named = _NAMED_KEYWORD.search(message)
    if named is None:
        return Reason((), sentence)
    return Reason((named[1] or named[2],), sentence)


@dataclass(frozen=True, slots=True)
class GrammarCheck:
    """The result of a check: an error, or "" and the warnings about ignored keywords."""

    error: str
    warnings: tuple[str, ...] = ()


def check_schema(schema: str) -> GrammarCheck:
    """llguidance's check of a JSON schema. It does not depend on the vocabulary."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_MAX_LEXER_FUEL, max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False
    )

    def validate() -> tuple[bool, list[str]]:
        result: tuple[bool, list[str]] = LLMatcher.validate_grammar_with_warnings(
            LLMatcher.grammar_from_json_schema(schema), None, limits=limits
        )
        return result

    try:
        is_rejected, message = on_deep_stack(schema, validate)
    except (UnsupportedError, ValueError) as e:
        return GrammarCheck(str(e))
    if is_rejected:
        return GrammarCheck(message[0])
    return GrammarCheck("", tuple(message))


def why_stuck(message: str) -> str:
    """Why generation under a grammar stopped, from llguidance's error."""
    reason = reason_of(message).sentence
    if "max is" in reason or "too " in reason:
        return (
            f"the grammar is too complex ({reason}): an object has at most about "
            "500 optional properties"
        )
    return "the answer reached a point at which its grammar, or logit_bias, allows no further token"
