"""Redistributions on meshes of many ranks, played in one process: every rank's program, and messages handed over by the test."""

from __future__ import annotations

from math import prod

import pytest
import torch

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.per_operator.mesh import NetworkMesh
from perfmodel.execute.per_operator.redistribute import Redistribution, _put, _take, local_part
from perfmodel.hardware.calibration import CollectiveKind
from perfmodel.parallel.per_operator.mesh import MeshAxis
from tests.execute.per_operator.layouts import PURPOSE, random_layouts, with_layout


def axes_of(*sizes):
    return tuple(MeshAxis(name="abc"[i], size=size, tier=0) for i, size in enumerate(sizes))


def play(programs, meshes, locals_):
    """Return the final tensor of every rank; all ranks must be at the same kind of step on the same axes."""
    for step, move in enumerate(programs[0].moves):
        moves = [program.moves[step] for program in programs]
        assert {(program_move.kind, program_move.axes) for program_move in moves} == {(move.kind, move.axes)}
        if move.kind is None:
            locals_ = [_take(local, program_move.out[0]) for local, program_move in zip(locals_, moves, strict=True)]
            continue
        moved = []
        for rank, mesh in enumerate(meshes):
            members = mesh.members(move.axes)
            index = members.index(rank)
            theirs, rank_move = [locals_[member] for member in members], moves[rank]
            if move.kind is CollectiveKind.ALL_REDUCE:
                moved.append(sum(theirs))
            elif move.kind is CollectiveKind.REDUCE_SCATTER:
                moved.append(sum(_take(shard, moves[member].out[index]) for shard, member in zip(theirs, members, strict=True)))
            elif move.kind is CollectiveKind.ALL_GATHER and rank_move.position >= 0:
                moved.append(torch.cat(theirs, rank_move.position))
            else:
                result = torch.full(rank_move.shape, float("nan"), dtype=torch.float64)
                for i, (tensor, member) in enumerate(zip(theirs, members, strict=True)):
                    if move.kind is CollectiveKind.ALL_TO_ALL:
                        piece = _take(tensor, moves[member].out[index])
                    else:
                        piece = _take(tensor, rank_move.pick[i])
                    _put(result, rank_move.into[i], piece)
                moved.append(result)
        locals_ = moved
    return locals_


@pytest.mark.parametrize(
    "axes, shape",
    [
        (axes_of(2, 2, 2), (8, 16, 8)),
        (axes_of(2, 3), (6, 12)),
        pytest.param(axes_of(3, 2, 2), (12, 24), marks=pytest.mark.slow),
        (axes_of(4, 2), (8, 3, 8)),
    ],
)
@pytest.mark.slow
def test_a_known_tensor_between_random_layouts_of_any_mesh(axes, shape):
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    num_ranks = prod(axis.size for axis in axes)
    meshes = [NetworkMesh(Worker(rank, num_ranks, "cpu"), axes) for rank in range(num_ranks)]
    played = 0
    for seed in range(150):
        source, target = random_layouts(seed, axes, len(shape))
        cut = [prod(meshes[0].sizes[axis] for axis in names) for layout in (source, target) for names in layout.cuts]
        if any(size % parts for size, parts in zip((*shape, *shape), cut, strict=True)):
            continue  # no plan has such a layout: shares are equal
        programs = [Redistribution(source, target, shape, mesh, PURPOSE) for mesh in meshes]
        ends = play(programs, meshes, [with_layout(full, source, mesh) for mesh in meshes])
        if target.partial:
            finish = [Redistribution(target, target.resolved(), shape, mesh, PURPOSE) for mesh in meshes]
            ends = play(finish, meshes, ends)
        for mesh, end in zip(meshes, ends, strict=True):
            torch.testing.assert_close(end, local_part(full, target.resolved(), mesh), msg=lambda text: f"{source} -> {target}: {text}")  # noqa: B023
        played += 1
    assert played >= 40
