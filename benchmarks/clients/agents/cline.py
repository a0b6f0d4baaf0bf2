"""Cline's CLI: the output of connect contains the command that configures it."""

from benchmarks.clients.agent import TASK, Agent, Place
from localllm.cli.editors.recipes import RECIPES


def _sign_in(place: Place) -> list[list[str]]:
    said = "In the terminal: "
    steps = RECIPES["cline"](place.target, place.home).steps
    return [next(s.removeprefix(said) for s in steps if s.startswith(said)).split()]


AGENT = Agent(
    "cline",
    "npm",
    "cline",
    "3.0.65",
    lambda place: ("cline", "--auto-approve", "true", "--cwd", str(place.folder), TASK),
    recipe="cline",
    prepare=_sign_in,
)
