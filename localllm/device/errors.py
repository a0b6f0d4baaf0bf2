"""Errors of the device room: a machine that can't be read, a device name nobody knows."""

from __future__ import annotations

from localllm.errors import LocalLLMError, NotFoundError


class DeviceUnreadableError(LocalLLMError):
    """The system did not say what every Device needs: how much memory there is."""

    code = "device_unreadable"
    default_hint = "describe the machine yourself: --device NAME --memory GB --bandwidth GBPS"


class DeviceNotFoundError(NotFoundError):
    """No device of that name in the table. The hint names the nearest ones."""

    code = "device_not_found"
    default_hint = "give --memory GB and --bandwidth GBPS to describe a machine that is not in the table"
