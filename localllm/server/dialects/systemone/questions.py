"""Typed questions: their bodies, how each is put to a chat model as labelled options, and the
answer made of probabilities.

The bodies are those of TypeSafe's System One API (its OpenAPI document of 2026, also spoken by
llama.cpp, Ollama and vLLM).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field

from localllm import json_store, paths
from localllm.errors import LocalLLMError, RequestError
from localllm.server.dialects.known import BodyPart

MOST_OPTIONS = 255
Content: TypeAlias = str | dict[str, Any] | list[Any]
Probabilities: TypeAlias = Sequence[float]


def as_text(content: Content | None) -> str:
    """A state, an instruction or a criterion as it stands in the prompt."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


def _option(name: str, about: Content | None) -> str:
    described = as_text(about)
    if described:
        return f"{name}: {described}"
    return name


class _Question(BodyPart):
    """What every question has. `instructions` None: the criteria say it."""

    model_config = ConfigDict(extra="forbid")
    default_question: ClassVar[str] = "Which of these fits best?"
    instructions: Content | None = None

    def options(self) -> dict[Any, str]:
        """The texts of the options by what each is as an answer, in the order that the answer's
        probabilities have."""
        raise NotImplementedError

    def orders(self, most: int) -> list[list[int]]:
        """Up to `most` orders to show the options in: rotations at even distances. All rotations
        together have each option once in every place."""
        n = len(self.options())
        n_orders = min(most, n)
        places = [*range(n)] * 2
        orders = []
        for i in range(n_orders):
            shift = i * n // n_orders
            orders.append(places[shift : shift + n])
        return orders

    def text(self, order: Sequence[int], labels: Sequence[str]) -> str:
        """The question with its options in `order`, the first of them behind the first label."""
        options = list(self.options().values())
        lines = [f"Question: {as_text(self.instructions) or self.default_question}"]
        for label, i in zip(labels, order, strict=False):
            lines.append(f"{label}. {options[i]}")
        return "\n".join(lines)

    def option_of(self, answer: str | bool | int) -> int:
        """The index of the option that `answer` names. Raises RequestError."""
        known = list(self.options())
        for i, option in enumerate(known):
            # True is not the level 1.
            if type(option) is type(answer) and option == answer:
                return i
        problem = f"the right answer is one of {', '.join(map(str, known))}"
        raise RequestError(problem[:400], param="examples")


class ChoiceQuestion(_Question):
    """One of several named options."""

    type: Literal["choice"]
    criteria: Annotated[dict[str, Content | None], Field(min_length=1, max_length=MOST_OPTIONS)]

    def options(self) -> dict[Any, str]:
        return {name: _option(name, about) for name, about in self.criteria.items()}

    def answer(self, p: Probabilities) -> dict[str, Any]:
        """The answer's body."""
        shares = dict(zip(self.criteria, p, strict=True))
        return {
            "type": self.type,
            "choice": max(shares, key=shares.__getitem__),
            "confidence": choice_confidence(p),
            "probabilities": shares,
        }


class ScoreQuestion(_Question):
    """A place on a scale whose levels are described, the lowest first."""

    default_question = "Which level of this scale fits best?"
    type: Literal["score"]
    criteria: Annotated[list[Content], Field(min_length=1, max_length=MOST_OPTIONS)]

    def options(self) -> dict[Any, str]:
        return dict(enumerate(map(as_text, self.criteria)))

    def orders(self, most: int) -> list[list[int]]:
        """A scale only goes up or down."""
        up = list(range(len(self.criteria)))
        return [up, up[::-1]][: min(most, len(up))]

    def answer(self, p: Probabilities) -> dict[str, Any]:
        """The answer's body."""
        return {
            "type": self.type,
            "score": sum(i * share for i, share in enumerate(p)),
            "confidence": score_confidence(p),
            "legend": {str(i): level for i, level in enumerate(self.criteria)},
            "probabilities": {str(i): share for i, share in enumerate(p)},
        }


class NoulQuestion(_Question):
    """A question of yes or no, or a statement that holds or does not."""

    default_question = "Which holds?"
    type: Literal["noul"]
    criteria: dict[Literal["true", "false"], Content | None] | None = None

    def options(self) -> dict[Any, str]:
        about = self.criteria or {}
        yes = about.get("true")
        no = about.get("false")
        return {True: _option("Yes, true", yes), False: _option("No, false", no)}

    def answer(self, p: Probabilities) -> dict[str, Any]:
        """The answer's body."""
        return {"type": self.type, "noul": p[0]}


Question: TypeAlias = Annotated[
    ChoiceQuestion | ScoreQuestion | NoulQuestion, Field(discriminator="type")
]


def choice_confidence(p: Probabilities) -> float:
    """How far the greatest probability is above chance: 0 where all are alike, 1 where one is
    certain (TypeSafe's formula, also llama.cpp's: tools/server/server-decision.cpp)."""
    if len(p) < 2:
        return 1.0
    return max(0.0, (max(p) - 1 / len(p)) / (1 - 1 / len(p)))


def score_confidence(p: Probabilities) -> float:
    """1 minus the mean distance to the likeliest level, divided by the mean distance of a uniform
    distribution to its middle (the same sources)."""
    if len(p) < 2:
        return 1.0
    mode = max(range(len(p)), key=p.__getitem__)
    middle = (len(p) - 1) / 2
    distance = sum(share * abs(i - mode) for i, share in enumerate(p))
    uniform = sum(abs(i - middle) for i in range(len(p))) / len(p)
    return max(0.0, 1 - distance / uniform)


# The temperatures that are tried, a twentieth apart: 0.05 to 20.
_TRIED = [1.05**i for i in range(-61, 62)]


def softmax(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities of log-odds `scores`."""
    best = max(scores)
    weights = [math.exp((s - best) / temperature) for s in scores]
    total = sum(weights)
    return [w / total for w in weights]


def loss(examples: Sequence[tuple[Sequence[float], int]], temperature: float) -> float:
    """Mean negative log-likelihood, in nats, of the right options."""
    shares = [softmax(scores, temperature)[right] for scores, right in examples]
    return -sum(math.log(max(p, 1e-300)) for p in shares) / len(shares)


def fit_temperature(examples: Sequence[tuple[Sequence[float], int]]) -> float:
    """The temperature that makes `examples` (an answer's scores, and the index of the right option)
    most likely (temperature scaling: Guo et al., "On Calibration of Modern Neural Networks", ICML
    2017). The prior of its logarithm is a normal distribution around 0, so few examples, or
    examples that are all right, leave it near 1."""

    def cost(temperature: float) -> float:
        prior = math.log(temperature) ** 2 / 2
        return len(examples) * loss(examples, temperature) + prior

    return min(_TRIED, key=cost)


def saved_temperature(fingerprint: str) -> float:
    """What was fitted for the model with that fingerprint; 1 where nothing was."""
    said = json_store.read(_file(fingerprint)).get("temperature")
    if isinstance(said, int | float) and 0 < said < math.inf:
        return float(said)
    return 1.0


def save_temperature(fingerprint: str, temperature: float, examples: int) -> None:
    """Keep it. Raises LocalLLMError where the disk refuses."""
    try:
        json_store.write(_file(fingerprint), {"temperature": temperature, "examples": examples})
    except OSError as e:
        raise LocalLLMError(
            f"the temperature can't be kept: {e.strerror}", hint="is the disk full?"
        ) from e


def _file(fingerprint: str) -> Path:
    return paths.decisions_dir() / f"{fingerprint.partition('-')[0]}.json"
