"""Degrees of parallelism, their order on the network, the layers of pipeline stages, and the rank of each stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.session import session_cache

#: Mesh axes, innermost (fastest-varying rank) first: Megatron's default order tp-cp-dp-pp, with torchtitan's two data axes.
DEFAULT_ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of the five mesh axes. Their product is the number of chips."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in DEFAULT_ORDER:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value!r}: must be a whole number of at least 1; use 1 to leave the axis out")

    @property
    def num_chips(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks with different sequences: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    def degree(self, axis: str) -> int:
        if axis not in DEFAULT_ORDER:
            raise InputError(f"axis={axis!r}: not a mesh axis; use one of {', '.join(DEFAULT_ORDER)}")
        return int(getattr(self, axis))

    def stride(self, axis: str, order: tuple[str, ...]) -> int:
        """Return the distance in ranks between neighbours on `axis`, with the axes in `order`, innermost first."""
        stride = 1
        for name in order:
            if name == axis:
                return stride
            stride *= self.degree(name)
        raise InputError(f"axis={axis!r}: not in order={'-'.join(order)}; name all of {', '.join(DEFAULT_ORDER)}")


def check_order(order: object) -> tuple[str, ...]:
    if not isinstance(order, (list, tuple)) or set(map(type, order)) != {str}:
        raise bad_field("order", shown(order), "must be the names of the axes, innermost first", f"write {'-'.join(DEFAULT_ORDER)}")
    order = tuple(order)
    if sorted(order) != sorted(DEFAULT_ORDER):
        raise InputError(f"order={'-'.join(order)}: must name each of {', '.join(DEFAULT_ORDER)} once, innermost first")
    return order


@session_cache(maxsize=65536)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors in rising order; the time grows with the square root of the number."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


#: The first stage may hold the embedding alone, the last one the head (Llama 3's pipelines; Megatron counts both as layers).
STAGES_WITHOUT_LAYERS = 2


def even_stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage, as evenly as possible.

    The remainder goes to the inner stages first, because the first stage also holds the embedding and the last one the head.
    """
    most = num_layers + STAGES_WITHOUT_LAYERS
    if num_stages > most:
        raise InputError(
            f"pp*virtual_stages={num_stages}: must not exceed num_hidden_layers + 2 = {most} (embedding and head may have a stage of "
            f"their own); use at most {most} stages in all"
        )
    base, extra = divmod(num_layers, num_stages)
    layers = [base] * num_stages
    for stage in [*range(1, num_stages - 1), 0, num_stages - 1][:extra]:
        layers[stage] += 1
    return tuple(layers)


def shorter_ends_stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage with embedding and head counted as a layer each: the end stages have one layer less.

    Megatron's --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split; torchtitan's default.
    """
    if num_stages < 2 or num_stages > num_layers:
        return even_stage_layers(num_layers, num_stages)
    first, *inner, last = even_stage_layers(num_layers + 2, num_stages)
    return (first - 1, *inner, last - 1)


# --- placement of virtual stages ----------------------------------------------------------------------------------------


class Placement(StrEnum):
    """Ranks of the virtual stages k, in model order.

    loop   k % p
    v      0 to p - 1, then p - 1 to 0: the last virtual stage is on the first rank (Qi et al. 2024, arXiv 2405.15362)
    """

    LOOP = "loop"
    V = "v"


def stages_of_rank(rank: int, num_ranks: int, num_stages: int, placement: Placement) -> tuple[int, ...]:
    """Return the virtual stages of a pipeline rank, in model order."""
    if placement is Placement.LOOP:
        return tuple(range(rank, num_stages, num_ranks))
    turns = (rank, num_ranks - 1 - rank)
    return tuple(chunk * num_ranks + turns[chunk % 2] for chunk in range(num_stages // num_ranks))


def stages_of_ranks(num_ranks: int, num_stages: int, placement: Placement) -> list[tuple[int, ...]]:
    """Return the virtual stages of each pipeline rank."""
    return [*map(partial(stages_of_rank, num_ranks=num_ranks, num_stages=num_stages, placement=placement), range(num_ranks))]


def rank_of_stage(stage: int, num_ranks: int, placement: Placement) -> int:
    """Return the pipeline rank of a virtual stage."""
    chunk, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if placement is Placement.V and chunk % 2 else rank
