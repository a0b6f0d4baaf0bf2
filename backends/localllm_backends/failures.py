"""What a backend may raise: all that crosses the border of `contract.py`, each with a message that a user can read."""

from __future__ import annotations


class BackendFailure(Exception):  # noqa: N818 - a family name; the leaves say Error
    """Base of everything a backend raises: `str(e)` says what happened and why; `hint` what to do, where that is not what
    it is for all of its kind."""

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class LoadError(BackendFailure):
    """The files can't be loaded: missing, truncated, another format, an unknown architecture."""


class OutOfMemoryError(BackendFailure):
    """Loading or stepping needs more memory than there is."""


class NoCellsError(BackendFailure):
    """A step would need more KV cells than are free. Nothing was appended."""


class StepError(BackendFailure):
    """The engine failed inside a step. Sequences named in it must be dropped."""


class InterruptedStepError(BackendFailure):
    """Somebody called `interrupt` while the step ran. Nothing was appended, and nothing is lost."""


class CannotRewindError(BackendFailure):
    """This model's memory can't be cut back to that length (recurrent state, trimmed window)."""


class OtherMachineError(LoadError):
    """Another machine that was to hold layers can't be had: no fault of the model's files."""
