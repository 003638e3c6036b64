"""Elementwise optimizers: bytes of state per parameter, and their location."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Optimizer(StrEnum):
    """An optimizer whose step reads every parameter once."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    PAGED_ADAMW = "paged-adamw"
    ADAMW_8BIT = "adamw-8bit"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    ADAMW_4BIT = "adamw-4bit"
    LION = "lion"
    LION_8BIT = "lion-8bit"
    ADAFACTOR = "adafactor"
    MUON = "muon"

    @property
    def num_states(self) -> int:
        """Number of state tensors of the parameter's shape: none; the momentum; the two moments."""
        return OPTIMIZERS[self].num_states

    @property
    def is_plain(self) -> bool:
        """Whether torch.optim has it and its states are on the chip in the dtype of the policy."""
        return self in (Optimizer.SGD, Optimizer.MOMENTUM, Optimizer.ADAM, Optimizer.ADAMW)

    @property
    def is_paged(self) -> bool:
        return OPTIMIZERS[self].is_paged

    def state_bytes(self, itemsize: float) -> float:
        """Return the bytes of all states of one parameter; `itemsize` is that of states without their own format."""
        entry = OPTIMIZERS[self]
        return entry.num_states * (entry.bytes_per_state or itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """State tensors of one optimizer.

    num_states       tensors of the parameter's shape
    bytes_per_state  of one entry, block scales included; 0: the dtype of the precision policy   [byte]
    is_paged         states are in unified memory, and are paged to the host when the chip's memory is full
    """

    num_states: int
    source: str
    bytes_per_state: float = 0.0
    is_paged: bool = False


#: 8 bits and a float32 maximum for each block of 256 (bitsandbytes 0.45, optim/optimizer.py: `blocksize = 256`). [byte]
_BLOCKWISE_8BIT = 1.0 + 4.0 / 256.0

#: 4 bits and a float32 scale for each block of 128 (torchao 0.7, prototype/low_bit_optim: `block_size=128`). [byte]
_BLOCKWISE_4BIT = 0.5 + 4.0 / 128.0

_ADAM = "Kingma and Ba, arXiv 1412.6980: two moments"
_BITSANDBYTES = "bitsandbytes 0.45, optim/optimizer.py: blocks of 256"
_PAGED = "bitsandbytes 0.45, functional.py, get_paged: cudaMallocManaged"

OPTIMIZERS: Mapping[Optimizer, OptimizerStates] = MappingProxyType(
    {
        Optimizer.SGD: OptimizerStates(num_states=0, source="torch.optim.SGD"),
        Optimizer.MOMENTUM: OptimizerStates(num_states=1, source="torch.optim.SGD with momentum"),
        Optimizer.ADAM: OptimizerStates(num_states=2, source=_ADAM),
        Optimizer.ADAMW: OptimizerStates(num_states=2, source=_ADAM),
        Optimizer.PAGED_ADAMW: OptimizerStates(num_states=2, is_paged=True, source=_PAGED),
        Optimizer.ADAMW_8BIT: OptimizerStates(num_states=2, bytes_per_state=_BLOCKWISE_8BIT, source=_BITSANDBYTES),
        Optimizer.PAGED_ADAMW_8BIT: OptimizerStates(
            num_states=2, bytes_per_state=_BLOCKWISE_8BIT, is_paged=True, source=f"{_BITSANDBYTES}; {_PAGED}"
        ),
        Optimizer.ADAMW_4BIT: OptimizerStates(
            num_states=2, bytes_per_state=_BLOCKWISE_4BIT, source="torchao 0.7, prototype/low_bit_optim: blocks of 128"
        ),
        Optimizer.LION: OptimizerStates(num_states=1, source="Chen et al., arXiv 2302.06675: one momentum"),
        Optimizer.LION_8BIT: OptimizerStates(num_states=1, bytes_per_state=_BLOCKWISE_8BIT, source=_BITSANDBYTES),
        # The second moment is a row and a column per matrix; by default there is no first moment.
        Optimizer.ADAFACTOR: OptimizerStates(num_states=0, source="Shazeer and Stern, arXiv 1804.04235, algorithm 4"),
        # For matrices, nearly all parameters; the embedding's second moment is not counted.
        Optimizer.MUON: OptimizerStates(num_states=1, source="github.com/KellerJordan/Muon: one momentum of each matrix"),
    }
)

__all__ = ["OPTIMIZERS", "Optimizer", "OptimizerStates"]
