"""Number formats of chips and tensors."""

from collections.abc import Callable
from enum import StrEnum


class Dtype(StrEnum):
    """A number format. tf32 is a way to multiply fp32 tensors: it is stored in 4 bytes."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"


_ITEMSIZE: dict[Dtype, float] = {
    Dtype.FP64: 8,
    Dtype.FP32: 4,
    Dtype.TF32: 4,
    Dtype.BF16: 2,
    Dtype.FP16: 2,
    Dtype.FP8: 1,
    Dtype.FP4: 0.5,
    Dtype.INT8: 1,
    Dtype.INT32: 4,
    Dtype.INT64: 8,
    Dtype.BOOL: 1,
}


#: Dtype -> bytes of one element in memory; fp4 packs two elements into one byte. [byte]
itemsize: Callable[[Dtype], float] = _ITEMSIZE.__getitem__
