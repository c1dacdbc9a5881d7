"""Numbers of the host, sent to a device without waiting for it.

Ordinary memory would make the host wait: torch copies from it, and then waits for everything that the stream still has
to do, the forward before included. Pinned memory goes in order with the stream's work, and torch keeps it until the
copy is done, whoever drops the tensor before. On a CPU nothing is copied: array and tensor are one memory.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array, dense, on `device`; valid for work that is queued on the current stream from now on."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
