"""The GPU and the stream that torch works on now, for kernels that torch does not launch itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def current_stream(device: "torch.device") -> Iterator[int]:
    """Make a GPU current and hand out the handle of torch's stream on it.

    A kernel on another stream would run before the tensors that it reads are written (cupy#7189);
    inside a capture the handle is that of the stream which is captured.
    """
    import torch

    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


@contextmanager
def current_device(device: "torch.device") -> Iterator[None]:
    """Make the GPU current on which a kernel's tensors lie; nothing on a CPU.

    Triton launches on the current GPU, whatever its arguments say.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
