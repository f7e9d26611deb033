"""What every launcher asks of a tensor that a kernel addresses by pointer."""

import torch
from torch import Tensor

# what the kernels compute with, and the longest block that they verify
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_TOKENS = 16


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise unless the tensor is dense and of this shape (and dtype, if one is given).

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    if tuple(tensor.shape) != shape or dtype not in (None, tensor.dtype) or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype}, {layout}; the kernel addresses it as contiguous "
            f"{list(shape)} {dtype or 'of any dtype'}. Pass a tensor of that kind (see the launcher's docstring)."
        )


def check_input_dtype(name: str, tensor: Tensor) -> None:
    """Raise unless the kernels compute with inputs of this dtype.

    Raises:
        ValueError: naming the argument and the dtypes.
    """
    if tensor.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"{name} is {tensor.dtype}; the kernels take {', '.join(map(str, INPUT_DTYPES))}. Convert it."
        )


def check_count(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor is one number of tokens.

    Raises:
        ValueError: naming the argument.
    """
    if tensor.shape != (1,) or tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}; it must be [1], int32 or int64.")
