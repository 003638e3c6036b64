"""Calls of the ranks in the tests of redistribution: one group of calls for many layouts."""

from __future__ import annotations

import random
from collections import Counter

import torch

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.measure.instrument import CollectiveCounter
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose
from perfmodel.execute.per_operator.redistribute import Redistribution, local_part
from perfmodel.parallel.algebra.sharding import Layout
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.workload.work import Pass

PURPOSE = Purpose(Pass.FORWARD, "x", "toy", "edge")


def random_layouts(seed: int, axes: tuple[MeshAxis, ...], positions: int) -> tuple[Layout, Layout]:
    """Two layouts, the second partial on no other axis than the first."""
    generator = random.Random(seed)

    def layout(partial_from: frozenset[str]) -> Layout:
        cuts: list[list[str]] = [[] for _ in range(positions)]
        partial = set()
        for axis in generator.sample(axes, len(axes)):
            position = generator.choice([*range(positions), *range(positions), "none", "partial"])
            if position == "partial" and axis.name in partial_from:
                partial.add(axis.name)
            elif isinstance(position, int):
                cuts[position].append(axis.name)
        return Layout(cuts=tuple(tuple(names) for names in cuts), partial=frozenset(partial))

    source = layout(frozenset(axis.name for axis in axes))
    return source, layout(source.partial)


def with_layout(full: torch.Tensor, layout: Layout, mesh: NetworkMesh) -> torch.Tensor:
    """This rank's local tensor: its part, and a share of it where the layout is partial."""
    ways = mesh.size(layout.partial)
    share = 2.0 * (mesh.index(sorted(layout.partial)) + 1) / (ways * (ways + 1))
    return local_part(full, layout, mesh) * share


def redistribute_all(
    worker: Worker, axes: tuple[MeshAxis, ...], shape: tuple[int, ...], pairs: list[tuple[Layout, Layout]]
) -> list[tuple[float, list[tuple[str, tuple[str, ...], float]], Counter[tuple[str, str]], dict[tuple[str, str], float]]]:
    """For each pair: the largest error, what was noted, and what torch's dispatcher saw (counts, elements)."""
    mesh = NetworkMesh(worker, axes)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []

    def label(ranks: list[int], kind: str) -> str:
        places = [mesh.coordinates(rank) for rank in ranks]
        return "+".join(axis.name for axis in axes if len({coordinates[axis.name] for coordinates in places}) > 1)

    for source, target in pairs:
        mesh.record = Counter()
        program = Redistribution(source, target, shape, mesh, PURPOSE)
        local = with_layout(full, source, mesh)
        with CollectiveCounter(label, times_them=False) as counter:
            result = program(local)
        if target.partial:
            # what is still partial: only the sum can be known
            result = Redistribution(target, target.resolved(), shape, mesh, PURPOSE)(result) if target.partial else result
        expected = local_part(full, target.resolved(), mesh)
        error = float((result - expected).abs().max()) if result.shape == expected.shape else float("inf")
        noted = [(str(row.kind), tuple(sorted(row.axes)), row.num_elements) for row in mesh.record.elements()]
        tally = counter.tally
        results.append((error, noted, Counter(tally.counts), {key: value / 8 for key, value in tally.num_bytes.items()}))
    return results
