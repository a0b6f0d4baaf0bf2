"""Grammars are compiled beside the engine's thread: a vocabulary's preparation and a large schema take as long as many
steps, and no stream stands still for them. The request they belong to waits in the queue meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.engine.sampling.grammar import Constraint

# (grammar as (kind, source), the answer's beginning that stands in the prompt already) to its constraint.
MakeConstraint = Callable[[tuple[str, str], str], Constraint]


@dataclass
class Compilation:
    """One grammar on its way: once `done`, there is its `constraint`, or why there is none in `error`."""

    constraint: Constraint | None = None
    error: str = ""
    done: bool = False


@dataclass
class Compiler:
    """Starts compilations; each has a thread of its own, so that one that takes long holds up no other."""

    make: MakeConstraint
    _news: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, grammar: tuple[str, str], begun: str) -> Compilation:
        """Begin with `grammar`, of an answer that begins with `begun`."""
        compilation = Compilation()
        self._threads = [t for t in self._threads if t.is_alive()]
        thread = threading.Thread(target=self._compile, args=(compilation, grammar, begun), name="grammar", daemon=True)
        self._threads.append(thread)
        thread.start()
        return compilation

    def _compile(self, compilation: Compilation, grammar: tuple[str, str], begun: str) -> None:
        try:
            compilation.constraint = self.make(grammar, begun)
        except Exception as e:
            compilation.error = f"the constraint can't be enforced: {e}"
        compilation.done = True
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Until some compilation is done, or for so long."""
        if self._news.wait(seconds):
            self._news.clear()

    def close(self) -> None:
        """Wait for those that still read the backend's vocabulary."""
        for thread in self._threads:
            thread.join()
