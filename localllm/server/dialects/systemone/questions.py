"""Typed questions: their bodies, their form in the prompt (options with labels), and answers made
from probabilities.

The bodies are those of TypeSafe's System One API (its OpenAPI document of 2026). llama.cpp, Ollama
and vLLM support it too."""

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

MAX_OPTIONS = 255
Content: TypeAlias = str | dict[str, Any] | list[Any]
Probabilities: TypeAlias = Sequence[float]


def as_text(content: Content | None) -> str:
    """Return a state, an instruction or a criterion as text for the prompt."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


def _option(name: str, about: Content | None) -> str:
    described = as_text(about)
    if described:
        return f"{name}: {described}"
    return name


class _Question(BodyPart):
    """Base class of all questions. `instructions` None: `default_question` is asked, and the
    criteria explain the options."""

    model_config = ConfigDict(extra="forbid")
    default_question: ClassVar[str] = "Which of these fits best?"
    instructions: Content | None = None

    def options(self) -> dict[Any, str]:
        """Return the texts of the options by their answer values, in the order of the answer's
        probabilities."""
        raise NotImplementedError

    def orders(self, max_orders: int) -> list[list[int]]:
        """Return up to `max_orders` orders in which to show the options: rotations at even
        distances. All rotations together show each option once at every position."""
        n = len(self.options())
        n_orders = min(max_orders, n)
        places = [*range(n)] * 2
        orders = []
        for i in range(n_orders):
            shift = i * n // n_orders
            orders.append(places[shift : shift + n])
        return orders

    def text(self, order: Sequence[int], labels: Sequence[str]) -> str:
        """Return the question with its options in `order`. The first label belongs to the first of
        them."""
        options = list(self.options().values())
        lines = [f"Question: {as_text(self.instructions) or self.default_question}"]
        for label, i in zip(labels, order, strict=False):
            lines.append(f"{label}. {options[i]}")
        return "\n".join(lines)

    def option_of(self, answer: str | bool | int) -> int:
        """Return the index of the option that `answer` names. Raises RequestError."""
        known = list(self.options())
        for i, option in enumerate(known):
            # The types are compared because True == 1.
            if type(option) is type(answer) and option == answer:
                return i
        problem = f"the right answer must be one of {', '.join(map(str, known))}"
        raise RequestError(problem[:400], param="examples")


class ChoiceQuestion(_Question):
    """A question with one of several named options as its answer."""

    type: Literal["choice"]
    criteria: Annotated[dict[str, Content | None], Field(min_length=1, max_length=MAX_OPTIONS)]

    def options(self) -> dict[Any, str]:
        return {name: _option(name, about) for name, about in self.criteria.items()}

    def answer(self, p: Probabilities) -> dict[str, Any]:
        """Return the answer's body."""
        shares = dict(zip(self.criteria, p, strict=True))
        return {
            "type": self.type,
            "choice": max(shares, key=shares.__getitem__),
            "confidence": choice_confidence(p),
            "probabilities": shares,
        }


class ScoreQuestion(_Question):
    """A question about the position on a scale. Its levels are described from the lowest to the
    highest."""

    default_question = "Which level of this scale fits best?"
    type: Literal["score"]
    criteria: Annotated[list[Content], Field(min_length=1, max_length=MAX_OPTIONS)]

    def options(self) -> dict[Any, str]:
        return dict(enumerate(map(as_text, self.criteria)))

    def orders(self, max_orders: int) -> list[list[int]]:
        """Return the ascending order, and the descending order if `max_orders` allows two."""
        up = list(range(len(self.criteria)))
        return [up, up[::-1]][: min(max_orders, len(up))]

    def answer(self, p: Probabilities) -> dict[str, Any]:
        """Return the answer's body."""
        return {
            "type": self.type,
            "score": sum(i * share for i, share in enumerate(p)),
            "confidence": score_confidence(p),
            "legend": {str(i): level for i, level in enumerate(self.criteria)},
            "probabilities": {str(i): share for i, share in enumerate(p)},
        }


class NoulQuestion(_Question):
    """A yes-or-no question, or a statement that is true or false."""

    default_question = "Which holds?"
    type: Literal["noul"]
    criteria: dict[Literal["true", "false"], Content | None] | None = None

    def options(self) -> dict[Any, str]:
        about = self.criteria or {}
        yes = about.get("true")
        no = about.get("false")
        return {True: _option("Yes, true", yes), False: _option("No, false", no)}

    def answer(self, p: Probabilities) -> dict[str, Any]:
        """Return the answer's body."""
        return {"type": self.type, "noul": p[0]}


Question: TypeAlias = Annotated[
    ChoiceQuestion | ScoreQuestion | NoulQuestion, Field(discriminator="type")
]


def choice_confidence(p: Probabilities) -> float:
    """Return how far the greatest probability is above chance: 0 if all are equal, 1 if one option
    is certain. The formula is TypeSafe's; llama.cpp uses it too
    (tools/server/server-decision.cpp)."""
    if len(p) < 2:
        return 1.0
    return max(0.0, (max(p) - 1 / len(p)) / (1 - 1 / len(p)))


def score_confidence(p: Probabilities) -> float:
    """Return 1 minus the mean distance to the most likely level. The distance is relative to the
    mean distance of a uniform distribution to its middle. Same sources as `choice_confidence`."""
    if len(p) < 2:
        return 1.0
    mode = max(range(len(p)), key=p.__getitem__)
    middle = (len(p) - 1) / 2
    distance = sum(share * abs(i - mode) for i, share in enumerate(p))
    uniform = sum(abs(i - middle) for i in range(len(p))) / len(p)
    return max(0.0, 1 - distance / uniform)


# The candidate temperatures, from 0.05 to 20 in steps of 5 %.
_TRIED = [1.05**i for i in range(-61, 62)]


def softmax(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return the probabilities for log-odds `scores`."""
    best = max(scores)
    weights = [math.exp((s - best) / temperature) for s in scores]
    total = sum(weights)
    return [w / total for w in weights]


def loss(examples: Sequence[tuple[Sequence[float], int]], temperature: float) -> float:
    """Return the mean negative log-likelihood of the right options, in nats."""
    shares = [softmax(scores, temperature)[right] for scores, right in examples]
    return -sum(math.log(max(p, 1e-300)) for p in shares) / len(shares)


def fit_temperature(examples: Sequence[tuple[Sequence[float], int]]) -> float:
    """Return the temperature that makes `examples` most likely. An example is an answer's scores
    and the index of the right option.

    This is temperature scaling (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017).
    The prior of the temperature's logarithm is a normal distribution around 0. So the temperature
    stays near 1 with few examples, or if all examples are right."""

    def cost(temperature: float) -> float:
        prior = math.log(temperature) ** 2 / 2
        return len(examples) * loss(examples, temperature) + prior

    return min(_TRIED, key=cost)


def saved_temperature(fingerprint: str) -> float:
    """Return the temperature that was fitted for the model with that fingerprint, or 1 if it was
    not fitted."""
    saved = json_store.read(_file(fingerprint)).get("temperature")
    if isinstance(saved, int | float) and 0 < saved < math.inf:
        return float(saved)
    return 1.0


def save_temperature(fingerprint: str, temperature: float, examples: int) -> None:
    """Save a fitted temperature. Raises LocalLLMError if it can't be written to disk."""
    try:
        json_store.write(_file(fingerprint), {"temperature": temperature, "examples": examples})
    except OSError as e:
        raise LocalLLMError(
            f"the temperature can't be saved: {e.strerror}", hint="check the free disk space"
        ) from e


def _file(fingerprint: str) -> Path:
    return paths.decisions_dir() / f"{fingerprint.partition('-')[0]}.json"
