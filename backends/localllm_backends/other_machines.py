"""What goes wrong with other machines that hold a part of a model: none of it is the fault of the model's files."""

from __future__ import annotations

from localllm_backends.contract import LoadError


class OtherMachineError(LoadError):
    """A machine that was to hold layers can't be had."""
