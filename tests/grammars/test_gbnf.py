"""GBNF grammars have the same meaning as in llama.cpp.

Random grammars and texts are compared, character by character, with llama.cpp's grammar sampler.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest
from llguidance import LLMatcher

from grammars.byte_matcher import allows, matcher_of
from localllm.grammars.gbnf import lark_of

LETTERS = 'ab&~-[]^\\"{}01 x'


class Reference:
    """llama.cpp's own grammar over the characters of a model's vocabulary."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._ids: dict[str, int] = {}
        room = ctypes.create_string_buffer(64)
        for token in range(llama_cpp.llama_vocab_n_tokens(self.vocab)):
            n = llama_cpp.llama_token_to_piece(self.vocab, token, room, 64, 0, False)
            if n == 1 and room.raw[:1].decode("ascii", "replace") in LETTERS:
                self._ids.setdefault(room.raw[:1].decode(), token)
        assert set(LETTERS) <= set(self._ids)
        self._eos = llama_cpp.llama_vocab_eos(self.vocab)

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)

    def allows(self, grammar: str, text: str) -> bool | None:
        """Return whether `text` is allowed as a whole, or None if the grammar is invalid."""
        sampler = llama_cpp.llama_sampler_init_grammar(self.vocab, grammar.encode(), b"root")
        if not sampler:
            return None
        try:
            for letter in text:
                if not self._may(sampler, self._ids[letter]):
                    return False
                llama_cpp.llama_sampler_accept(sampler, self._ids[letter])
            return self._may(sampler, self._eos)
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def _may(self, sampler: object, token: int) -> bool:
        data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 0.0, 0.0))
        candidates = llama_cpp.llama_token_data_array(data, 1, -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
        return bool(data[0].logit > float("-inf"))


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Iterator[Reference]:
    reference = Reference(smollm2)
    yield reference
    reference.close()


CLASSES = (
    "[ab]",
    "[^a]",
    "[a&&b]",
    "[a~~b]",
    "[a--b]",
    "[^&&<>]",
    r"[\x61-\x62]",
    r"[\u0030\u0031]",
    "[[a]",
    r"[\]^]",
    r"[\\-]",
    "[^b-a]",
)
TEXTS = (
    '"a"',
    '"ab"',
    '"&&"',
    '""',
    r'"\x61"',
    r'"\u0062\U00000061"',
    r'"\"\\"',
    '"{0}"',
    '"[a]"',
    "r",
    "R-1",
    ".",
)


RECURSIVE = ('| "x" R-1 "x"', '"[" (R-1 | r)? "]" | "0"', '"0" | "1"')


def some_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(rng.choice([CLASSES, TEXTS]))
    inner = [some_expression(rng, depth - 1) for _ in range(rng.choice([1, 2, 2, 3]))]
    kind = rng.random()
    if kind < 0.4:
        return f"({rng.choice(inner)}){rng.choice(['*', '+', '?', '{0}', '{2}', '{1,}', '{0,2}', '{1,3}', ''])}"
    if kind < 0.7:
        return " ".join(inner)
    return f"({' | '.join(rng.choice([*inner, '']) for _ in inner)})"


def some_grammar(rng: random.Random) -> str:
    rules = [
        f"root ::= {some_expression(rng, 3)}",
        f"r ::= {some_expression(rng, 2)}".replace(" r ", " . "),
    ]
    rules.append("R-1 ::= " + rng.choice(RECURSIVE))
    rng.shuffle(rules)
    return "\n".join(rules) + "\n"


def test_random_grammars_accept_the_same_texts_as_in_llama_cpp(reference: Reference) -> None:
    right = refused = 0
    for seed in range(250):
        rng = random.Random(seed)
        grammar = some_grammar(rng)
        texts = {
            "".join(rng.choice(LETTERS) for _ in range(rng.randrange(5))) for _ in range(25)
        } | {
            "",
            "a",
            "ab",
            "x0x",
            "[0]",
        }
        theirs = {text: reference.allows(grammar, text) for text in texts}
        try:
            ours = matcher_of(LLMatcher.grammar_from_lark(lark_of(grammar)))
        except (ValueError, AssertionError):
            refused += 1
            continue
        if None in theirs.values():
            continue  # left recursion, which we allow
        for text, allowed in theirs.items():
            assert allows(ours, text) == allowed, (seed, grammar, text, allowed)
            right += bool(allowed)
    assert refused < 25, refused
    assert right > 400, right


ACCEPTED = {
    "names": ('root ::= start Foo-bar foo_bar 1a\nstart ::= "1"\nFoo-bar ::= "2"\nfoo_bar ::= "3"\n1a ::= "4"', "1234"),
    "Lark's own words": ('root ::= lazy json regex\nlazy ::= "a"\njson ::= "b"\nregex ::= "c"',
    "abc"),
    "escapes": (r'root ::= "\x41\u00e9\U0001F600" [\u3041-\u3096]', "Aé😀あ"),
    "comments and line ends": ('# a\r\nroot ::= a # b\r\n  | b\r\n\r\na ::= "1"\r\nb ::= "2"',
    None),
    "over lines": ('root ::= (\n "a" |\n "b" # or\n)\n', "b"),
    "a quantifier of a quantifier": ('root ::= ("a"+)? "b"+?', "aab"),
    "the last of two": ('root ::= "a"\nroot ::= "b"', "b"),
    "a greedy class before a letter of it": ('root ::= [a-z]+ "z" "!" | root "?"', "abz!?"),
    "an empty way": ('root ::= "x" ( | "a")', "x"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_gbnf_syntax_is_accepted(name: str) -> None:
    grammar, text = ACCEPTED[name]
    if text is None:
        with pytest.raises(ValueError, match="line 3"):  # a rule ends at the end of its line
            lark_of(grammar)
        return
    assert allows(matcher_of(LLMatcher.grammar_from_lark(lark_of(grammar))), text)


@pytest.mark.parametrize(
    "grammar",
    [
        "", "   ", "root", "root ::= (", 'root ::= "\\', 'root ::= "a', "root ::= "
                                                                        "missing", 'a ::= '
                                                                                   '"x"', r'root '
                                                                                          r'::= '
                                                                                          r'[\w]',
        r'root ::= "\d"', "root ::= []", 'root ::= "a"{5,0}', 'root ::= "a"{1,9999999}', "root ::= *", r'root '
                                                                                                       r'::= '
                                                                                                       r'"\ud800"',
        "root ::= [z-a]", "root ::= " + "(" * 3000, "root ::= <|im_end|>", 'root ::= "a" '
                                                                           '[^]', 'root ::= "a" )',
    ],
)  # fmt: skip
def test_an_invalid_grammar_is_refused_with_its_line_or_rule(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"in line \d|no rule with the name"):
        lark_of(grammar)
