"""Event simulation of a pipeline from the orders of its ranks, and what a rank has in flight by its order.

A pass starts as soon as its rank is free and its inputs are ready. A forward pass depends on the forward of the previous virtual stage,
a backward pass on the backward of the next one and on its own forward. If backward is split, this holds for the gradients of inputs, and
gradients of weights depend on those. A virtual stage may run some backward passes as a whole and split others. The simulation uses no
formula for bubbles: closed forms do, and a test compares both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.parallel.layout import Placement, stages_of_ranks

#: Kinds of passes; a schedule may split backward into the gradients of inputs and those of weights. A paired backward pass is a whole one
#: that runs as one action with the forward pass before it: what both send leaves at its end.
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, PAIRED_BACKWARD = "F", "B", "I", "W", "&"

#: Kinds after which a micro-batch is no longer in flight on its virtual stage.
FREEING = (BACKWARD, PAIRED_BACKWARD, WEIGHT_GRADIENT)

#: One pass: kind, virtual stage of the rank (chunk), micro-batch.
Pass = tuple[str, int, int]

#: What the end of a pass makes ready: the gradients of inputs are ready after either kind of backward pass.
_MAKES = {
    FORWARD: FORWARD,
    **dict.fromkeys((BACKWARD, PAIRED_BACKWARD, INPUT_GRADIENT), INPUT_GRADIENT),
    WEIGHT_GRADIENT: WEIGHT_GRADIENT,
}

#: What must be ready on the same virtual stage, and step to the stage that sends the input.
_DEPENDS_ON = {
    FORWARD: ("", -1),
    **dict.fromkeys((BACKWARD, PAIRED_BACKWARD, INPUT_GRADIENT), (FORWARD, 1)),
    WEIGHT_GRADIENT: (INPUT_GRADIENT, 0),
}


#: One pass as it runs: rank, position in the order of the rank, and the same of the pass at whose end its input is sent; None: no rank
#: sends one, and it begins as soon as its rank is free.
Step = tuple[int, int, tuple[int, int] | None]


def steps_of(orders: Sequence[Sequence[Pass]], num_stages: int, placement: Placement) -> list[Step]:
    """Return the passes of all ranks, each after those that it depends on.

    Passes of one rank run one after the other: only an input from another rank delays a pass. Raises ValueError if the orders wait for each
    other, with the first such pass of each rank.
    """
    num_ranks = len(orders)
    stages = stages_of_ranks(num_ranks, num_stages, placement)
    ready: dict[tuple[str, int, int], tuple[int, int]] = {}
    waits: list[list[tuple[str, int, int]]] = [[] for _ in orders]  # outputs that leave with the next pass
    done = [0] * num_ranks
    steps: list[Step] = []
    while len(steps) < sum(map(len, orders)):
        before_round = len(steps)
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                kind, chunk, microbatch = order[done[rank]]
                stage, output = stages[rank][chunk], _MAKES[kind]
                before, step = _DEPENDS_ON[kind]
                if before and (before, stage, microbatch) not in ready:
                    break
                sender, sent = stage + step, None
                if step and 0 <= sender < num_stages and (sent := ready.get((output, sender, microbatch))) is None:
                    break
                steps.append((rank, done[rank], sent if sent is None or sent[0] != rank else None))
                waits[rank].append((output, stage, microbatch))
                done[rank] += 1
                is_in_pair = done[rank] < len(order) and order[done[rank]][0] == PAIRED_BACKWARD
                if not is_in_pair:
                    ready |= dict.fromkeys(waits[rank], (rank, done[rank] - 1))
                    waits[rank].clear()
        if len(steps) == before_round:
            waiting = []
            for rank, (order, number) in enumerate(zip(orders, done, strict=True)):
                waiting += [f"rank {rank} waits at {pass_text(one, stages[rank])}" for one in order[number : number + 1]]
            raise ValueError(", ".join(waiting))
    return steps


def pass_times(
    orders: Sequence[Sequence[Pass]], lengths: Mapping[str, Sequence[float]], *, placement: Placement, hop: float = 0.0
) -> list[list[tuple[float, float]]]:
    """Return the start and the end of each pass of each rank. [s]

    lengths   time of each kind of pass on each virtual stage, in model order   [s]
    hop       time of a send from rank to rank, while both compute   [s]
    """
    num_stages = len(lengths[FORWARD])
    stages = stages_of_ranks(len(orders), num_stages, placement)
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    for rank, position, sent in steps_of(orders, num_stages, placement):
        kind, chunk, _ = orders[rank][position]
        free = times[rank][-1][1] if position else 0.0
        start = free if sent is None else max(free, times[sent[0]][sent[1]][1] + hop)
        times[rank].append((start, start + lengths[BACKWARD if kind == PAIRED_BACKWARD else kind][stages[rank][chunk]]))
    return times


def pass_text(one: Pass, stages: Sequence[int]) -> str:
    """Return a pass in torch's notation: virtual stage, kind, micro-batch."""
    kind, chunk, microbatch = one
    return f"{stages[chunk]}{kind}{microbatch}"


def in_flight(order: Sequence[Pass], chunks: Sequence[int]) -> tuple[float, ...]:
    """Return the fields of `LiveLayers` of a rank from its order.

    A pass is in flight from its forward to the end of its backward, or of its gradients of weights.

    chunks   layers of its virtual stages
    """
    held, at_first = 0, -1
    alive, run = list[int](), list[int]()  # layers in flight as each backward pass begins, and its chunk
    for kind, chunk, _ in order:
        if kind == FORWARD:
            held += chunks[chunk]
            continue
        at_first = held if at_first < 0 else at_first
        if kind in FREEING:
            alive.append(held)
            run.append(chunk)
            held -= chunks[chunk]
    v, layers, number = len(chunks), max(sum(chunks), 1), len(alive)
    first_of = [run.index(chunk) for chunk in range(v)]
    most = max(alive)
    last = max(i for i in range(number) if alive[i] == most)
    ran = [chunk for chunk in range(v) if first_of[chunk] < last]
    all_ran = min(max(first_of) + 1, number - 1)
    gone = all_ran > last
    at_end = [alive[i] for i in range(number) if run[i] == v - 1]
    at_start = [alive[i] - chunks[0] for i in range(number) if run[i] == 0]
    later_at_end = [alive[i] for i in range(max(first_of) + 1, number) if run[i] == v - 1]
    second = [i for i in range(number) if run[i] == 0][:2][-1]
    over = [chunk for chunk in range(1, v) if chunk not in run[second:]]
    return (
        float(at_first),
        float(most),
        sum(chunks[chunk] for chunk in ran) / layers if sum(chunks) else len(ran) / v,
        float(0 in ran),
        float(v - 1 in ran),
        float(most - max(alive[all_ran:])) if gone else 0.0,
        float(gone),
        float(chunks[run[last]]) if run[last] not in ran else 0.0,
        float(most - max(at_end)),
        float(most - max(at_start)),
        float(max(at_end) - max(later_at_end, default=0)),
        float(max(at_start) - max(at_start[1:], default=0)),
        sum(chunks[chunk] for chunk in over) / layers,
        *freed_weights(order, chunks),
    )


#: Virtual stages whose weights a rank of torch's pipelines gathers at most at a time (`_add_unshard_reshard` of torch 2.13).
MOST_GATHERED = 3


def gathered_chunks(order: Sequence[Pass]) -> list[tuple[int, ...]]:
    """Return the virtual stages that are gathered during each pass: the next `MOST_GATHERED` of the order. All others are freed."""
    gathered: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for _, chunk, _ in reversed(order):
        following = (chunk, *(other for other in following if other != chunk))[:MOST_GATHERED]
        gathered.append(following)
    return gathered[::-1]


def freed_weights(order: Sequence[Pass], chunks: Sequence[int]) -> tuple[float, float, float]:
    """Return the freed weights when the most layers are in flight: share of the layers, and 1 if the first, the last chunk is freed.

    chunks   layers of the virtual stages of the rank
    """
    if len(chunks) <= MOST_GATHERED:
        return 0.0, 0.0, 0.0
    held, alive = 0, list[tuple[int, tuple[int, ...]]]()
    for (kind, chunk, _), gathered in zip(order, gathered_chunks(order), strict=True):
        if kind == FORWARD:
            held += chunks[chunk]
        elif kind in FREEING:
            alive.append((held, gathered))
            held -= chunks[chunk]
    most = max(layers for layers, _ in alive)
    at_most = [gathered for layers, gathered in alive if layers == most]
    layers = max(sum(chunks[chunk] for chunk in gathered) for gathered in at_most)
    first, last = (float(not any(chunk in gathered for gathered in at_most)) for chunk in (0, len(chunks) - 1))
    return 1.0 - layers / max(sum(chunks), 1), first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A gather of a virtual stage: number of passes of each kind before it is issued and before the first pass that waits for it.

    Paired backward passes count as backward passes.
    """

    chunk: int
    issued: Counter[str]
    needed: Counter[str]


def gathers_of(order: Sequence[Pass]) -> list[Gather]:
    """Return the gathers of sharded weights of a rank in a step, in the order in which it waits for them.

    With no more virtual stages than `MOST_GATHERED` each is gathered once.
    """
    gathers: list[Gather] = []
    issued: dict[int, Counter[str]] = {}
    held: tuple[int, ...] = ()
    before = Counter[str]()
    for (kind, chunk, _), gathered in zip(order, gathered_chunks(order), strict=True):
        issued |= {other: before.copy() for other in gathered if other not in held}
        if chunk in issued:
            gathers.append(Gather(chunk=chunk, issued=issued.pop(chunk), needed=before.copy()))
        before[BACKWARD if kind == PAIRED_BACKWARD else kind] += 1
        held = gathered
    return gathers
