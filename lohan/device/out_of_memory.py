"""Detection of all forms in which a device reports that it is out of memory."""

from __future__ import annotations

import re

import torch

# Libraries allocate outside torch's allocator, and their failures are plain RuntimeErrors. Examples
# are handles of cuBLAS and cuDNN, kernels that the driver loads on first use, and buffers of NCCL.
_MESSAGES = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_INITIALIZED|OUT_OF_(DEVICE|HOST)_MEMORY"
    r"|Failed to CUDA (m|c)alloc",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch means that the device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None
