"""The finer axes of ranks, and what groups over them are called."""

from __future__ import annotations

from itertools import product

from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.folded_mesh import folded_mesh
from perfmodel.parallel.plan import place_of
from tests.execute.jobs import tiny, tiny_plan


def mesh_of(num_chips, model="mixtral", **knobs):
    plan = tiny_plan(num_chips, model=tiny(model), **knobs)
    return plan, folded_mesh(plan)


def test_groups_have_the_names_of_attention_or_of_experts():
    _, mesh = mesh_of(32, ep=8, cp=2, tp=4, etp=2, zero=1, batch=8)  # dp_shard 4 = 2 x 2, cp whole and half of tp are ep's
    assert mesh.name(EXPERT_AXES, "all_to_all") == "ep"
    assert mesh.name(("dp_shard", "cp"), "reduce_scatter") == "edp"
    assert mesh.name(("dp_shard", "dp_ep", "cp", "cp_ep"), "reduce_scatter") == "dp_shard+cp"
    assert mesh.name(("tp_kv_ep", "tp_kv", "tp_q_ep", "tp_q"), "all_reduce") == "tp"
    assert mesh.name(("tp_kv", "tp_q"), "all_gather") == "etp"
    assert mesh.name((), "all_reduce") == mesh.name(("pp",), "all_reduce") == ""


def test_the_same_ranks_are_called_by_what_they_do():
    _, mesh = mesh_of(8, ep=8, zero=1)
    assert (mesh.name(EXPERT_AXES, "all_to_all"), mesh.name(EXPERT_AXES, "reduce_scatter")) == ("ep", "dp_shard")


def test_every_rank_has_a_place_of_its_own_and_the_mesh_is_that_of_attention():
    plan, mesh = mesh_of(32, ep=8, cp=2, tp=4, etp=2, zero=1, batch=8)
    places = {tuple(mesh.fine_indices(place_of(plan, rank)).values()) for rank in range(32)}
    assert len(places) == 32
    names = tuple(mesh.fine_indices(place_of(plan, 0)))
    assert places == set(product(*(range(mesh.sizes[name]) for name in names)))


def test_without_experts_groups_have_the_names_of_the_layout():
    plan, mesh = mesh_of(16, "llama", tp=2, cp=2, zero=3)
    assert mesh.name(("dp_shard", "cp"), "all_gather") == "dp_shard+cp"
    assert mesh.name(("cp",), "all_to_all") == "cp"  # heads for a sequence
    assert mesh.group_name([place_of(plan, rank) for rank in (0, 1)], "all_reduce") == "tp"
