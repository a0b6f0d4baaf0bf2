"""The errors that a backend raises, each with a message for the user."""

from __future__ import annotations


class BackendFailure(Exception):  # noqa: N818 - the family's name; its subclasses end in Error
    """Base class of all errors that a backend raises.

    `str(e)` gives the failure and its cause. `hint` gives the remedy if it differs from the usual
    one for the error's class.
    """

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class LoadError(BackendFailure):
    """The files can't be loaded: missing, truncated, in another format, or of an unknown
    architecture."""


class UnusableEngineError(BackendFailure):
    """The engine's own library can't be loaded or used. No model is at fault."""


class OutOfMemoryError(BackendFailure):
    """Loading or a step needs more memory than is available."""


class NoCellsError(BackendFailure):
    """A step needs more KV cells than are free. The step appended no tokens."""


class StepError(BackendFailure):
    """The engine failed inside a step. The step's sequences must be dropped."""


class InterruptedStepError(BackendFailure):
    """`interrupt` ended the running step. The step appended no tokens, and all sequences stay
    valid."""


class CannotRewindError(BackendFailure):
    """The model's memory can't be truncated to that length (recurrent state, sliding window)."""


class OtherMachineError(LoadError):
    """A worker machine that should hold layers is not available. The model's files are not at
    fault."""
