"""Every rank's local program of random sharded operators and graphs, in numpy, against the program on whole tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.sharding import Layout, Sharding, gradient_layout, output_layout
from perfmodel.workload.graph import DimRoles, Graph, Operand, Operator, Repeat, Tensor, TensorRole
from perfmodel.workload.kinds.dense import einsum, elementwise, identity, rms_norm
from perfmodel.workload.kinds.vocabulary import embedding
from tests.marks import mostly_slow
from tests.oracles.simulated_operators import Algebra, GraphRun, derived
from tests.oracles.simulated_ranks import SimulatedMesh

MESHES = (
    {"dp_shard": 2, "tp_kv": 3},
    {"cp": 4, "tp_kv": 2},
    {"cp": 3, "tp_kv": 4},
    {"dp_shard": 2, "cp": 2, "tp_kv": 2},
    {"cp": 2, "tp_kv": 3, "tp_q": 2},
)

EINSUMS = (
    "bsh,hf->bsf",  # linear, column
    "bsf,hf->bsh",  # linear, row
    "bsh,gdh->bsgd",  # projection to heads
    "bsgd,hgd->bsh",  # and back
    "bqgd,bzgd->bgqz",  # attention scores
    "bgqz,bzgd->bqgd",  # attention context
    "bqgr,bzg->bgrqz",  # queries that share a key
    "bsv,vh->bsh",  # embedding as a product with one-hot rows
    "ecd,edf->ecf",  # experts
    "bsh,h->bs",
    "i,j->ij",
    "bsh,bsh->bsh",
    "bsh,bsh->s",
)


@dataclass
class GraphMaker:
    """Collects operators on dims that all have the same size."""

    size: int
    random: np.random.Generator
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, np.ndarray] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    """Operators that do the same as another one and are cut as it is."""

    def leaf(self, num_dims: int, role: TensorRole = TensorRole.PARAMETER, *, integers: bool = False) -> str:
        name = f"leaf{len(self.leaves)}"
        self.tensors[name] = Tensor(name=name, shape=(self.size,) * num_dims, role=role, itemsize=2.0, num_rows=1)
        shape = (self.size,) * num_dims
        self.leaves[name] = self.random.integers(0, self.size, shape) if integers else self.random.normal(size=shape) / self.size**0.5
        return name

    def op(self, kind: str, inputs: list[tuple[str, str]], output: str) -> str:
        """Operands' dims are one letter each."""
        name = f"op{len(self.operators)}"
        letters = sorted({*"".join(dims for _, dims in inputs), *output})
        padded = str(self.random.choice(letters))
        self.tensors[f"{name}.out"] = Tensor(name=f"{name}.out", shape=(self.size,) * len(output), itemsize=2.0)
        operands = tuple(Operand(tensor=tensor, dims=tuple(dims)) for tensor, dims in inputs)
        out, sizes = Operand(tensor=f"{name}.out", dims=tuple(output)), dict.fromkeys(letters, self.size)
        match kind:
            case "einsum":
                operator = einsum(name, *operands, out, sizes)
            case "embedding":
                operator = embedding(name, *operands, out, sizes)
            case "identity":
                operator = identity(name, *operands, out, sizes)
            case "rms_norm":
                operator = rms_norm(name, *operands, out, sizes)
            case "attention":
                operator = Operator(name=name, kind=kind, dims=sizes, inputs=operands, output=out, roles=DimRoles(unsplit=("z",)))
            case function:
                operator = elementwise(name, function, operands, out, sizes)
        unsplit = tuple(d for d in letters if d == "d" or d in operator.roles.unsplit)
        self.operators.append(replace(operator, roles=replace(operator.roles, padded=(padded,), unsplit=unsplit), layer="layer"))
        return f"{name}.out"

    def graph(self) -> Graph:
        return Graph(
            name="random",
            operators=tuple(self.operators),
            tensors=self.tensors,
            repeats=(Repeat(layer="layer", count=1, carried=self.operators[0].output.tensor),),
        )

    # --- random operators on the tensors made so far ------------------------------------------------------------

    def num_dims(self, tensor: str) -> int:
        return next(len(op.output.dims) for op in self.operators if op.output.tensor == tensor)

    def any(self, num_dims: int | None = None) -> str:
        outputs = [op.output.tensor for op in self.operators if num_dims is None or len(op.output.dims) == num_dims]
        return str(self.random.choice(outputs)) if outputs else self.linear(num_dims or 3)

    def linear(self, num_dims: int) -> str:
        """Contracts one or more of the last dims of a tensor with a weight and puts new ones in their place."""
        x = self.any()
        have = "bsh"[: self.num_dims(x)]
        kept = have[: int(self.random.integers(0, min(len(have) - 1, num_dims) + 1))]
        new = "fge"[: num_dims - len(kept)]
        weight = new + have[len(kept) :]
        return self.op("einsum", [(x, have), (self.leaf(len(weight)), weight)], kept + new)

    def grow(self) -> None:
        letters = "bsh"
        match self.random.choice(
            ["linear", "linear", "product", "branches", "add", "add", "tanh", "mul", "bias", "rms_norm", "identity", "attention"]
        ):
            case "linear":
                self.linear(int(self.random.integers(1, 4)))
            case "product":
                self.op("einsum", [(self.any(3), "bqk"), (self.any(3), "bzk")], "bqz")
            case "branches":  # two products that may be partial alike, added
                first = self.linear(int(self.random.integers(1, 4)))
                model = self.operators[-1]
                (x, dims), (_, weight) = ((operand.tensor, "".join(operand.dims)) for operand in model.inputs)
                second = self.op("einsum", [(x, dims), (self.leaf(len(weight)), weight)], "".join(model.output.dims))
                self.twins[self.operators[-1].name] = model.name
                dims = letters[: len(model.output.dims)]
                self.op("add", [(first, dims), (second, dims)], dims)
            case "add":
                x = self.any()
                more = [self.any(self.num_dims(x)) for _ in range(int(self.random.integers(1, 3)))]
                dims = letters[: self.num_dims(x)]
                self.op("add", [(t, dims) for t in (x, *more)], dims)
            case "mul":
                x = self.any()
                dims = letters[: self.num_dims(x)]
                self.op("mul", [(x, dims), (self.any(len(dims)), dims)], dims)
            case "attention" if self.random.random() < 0.5:
                inputs = [(self.any(3), "qgd"), (self.any(3), "zgd"), (self.any(3), "zgd")]
                self.op("attention", inputs, "qgd")
            case "attention":
                inputs = [(self.any(3), "qrd"), (self.any(2), "zd"), (self.any(2), "zd")]
                self.op("attention", inputs, "qrd")
            case "identity":
                dims = letters[: self.num_dims(x := self.any())]
                self.op("identity", [(x, dims)], dims)
            case "tanh":
                dims = letters[: self.num_dims(x := self.any())]
                self.op("tanh", [(x, dims)], dims)
            case kind:  # bias, rms_norm: with a parameter on the last position
                dims = letters[: self.num_dims(x := self.any())]
                inputs = [(x, dims), (self.leaf(1), dims[-1])]
                self.op(kind, inputs, dims)


def random_sharding(op: Operator, axes: list[str], random: np.random.Generator) -> Sharding:
    """Each axis cuts one dim or none; what must stay whole (and, here, what a norm reduces) is not cut."""
    unsplit = {*op.roles.unsplit, *(op.inputs[1].dims if op.kind == "rms_norm" else ())}
    free = [dim for dim in op.dims if dim not in unsplit]
    sharding: dict[str, tuple[str, ...]] = {}
    for axis in random.permutation(axes):
        if free and random.random() < 0.75:
            name = str(random.choice(free))
            sharding[name] = (*sharding.get(name, ()), str(axis))
    return sharding


def random_graph(mesh: SimulatedMesh, random: np.random.Generator) -> tuple[GraphMaker, dict[str, Sharding]]:
    maker = GraphMaker(size=mesh.size(frozenset(mesh.sizes)), random=random)
    tokens = maker.leaf(2, TensorRole.INDEX, integers=True)
    maker.op("embedding", [(tokens, "bs"), (maker.leaf(2), "vh")], "bsh")
    for _ in range(int(random.integers(2, 7))):
        maker.grow()
    shardings = {op.name: random_sharding(op, list(mesh.sizes), random) for op in maker.operators}
    return maker, {name: shardings[maker.twins.get(name, name)] for name in shardings}


def check(mesh: SimulatedMesh, maker: GraphMaker, shardings: dict[str, Sharding], algebra: Algebra | None = None) -> GraphRun:
    graph = maker.graph()
    run = GraphRun(mesh, graph, shardings, maker.leaves, np.random.default_rng(0), algebra or Algebra()).run()
    derivation = derive(graph, shardings)
    run.check_parameters(derivation)
    assert Counter(run.sent) == derived(mesh, derivation)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("equation", EINSUMS)
def test_an_einsum_under_any_sharding(equation):
    """Forward and both gradients, as the layouts claim; nothing is sent inside one operator."""
    random = np.random.default_rng(len(equation))
    operands, output = equation.split("->")
    for sizes in ({"cp": 2, "tp_kv": 3}, {"dp_shard": 2, "cp": 2, "tp_kv": 2}):
        mesh = SimulatedMesh(sizes)
        for _ in range(25):
            maker = GraphMaker(size=mesh.size(frozenset(sizes)), random=random)
            maker.op(
                "einsum",
                [(maker.leaf(len(dims)), dims.replace("d", "k")) for dims in operands.split(",")],
                output.replace("d", "k"),
            )
            run = check(mesh, maker, {"op0": random_sharding(maker.operators[0], list(sizes), random)})
            assert run.sent == []


@pytest.mark.slow
@pytest.mark.parametrize("sizes", mostly_slow(MESHES), ids=str)
def test_random_graphs(sizes):
    """Chains, forks and additions: every layout, every gradient, and every collective's bytes as derived."""
    random = np.random.default_rng(sum(sizes.values()))
    mesh = SimulatedMesh(sizes)
    num_sent = 0
    for _ in range(12):
        num_sent += len(check(mesh, *random_graph(mesh, random)).sent)
    assert num_sent > 60


@pytest.mark.slow
@pytest.mark.nightly
def test_random_graphs_reach_the_corners():
    """The seeds above hold forks, partial sums that are added up before they are reduced, and promotions."""
    random = np.random.default_rng(11)
    mesh = SimulatedMesh({"cp": 2, "tp_kv": 2})
    carried = promoted = 0
    for _ in range(150):
        run = check(mesh, *random_graph(mesh, random))
        carried += len(run.carried)
        for op in run.graph.operators:
            layouts = [run.gradients[reader.name, i][0] for reader, i in run.graph.consumers(op.output.tensor)]
            promoted += any(a.cuts == b.cuts and a.partial < b.partial for a in layouts for b in layouts)
    assert carried >= 3
    assert promoted >= 3


# --- a wrong rule is found ------------------------------------------------------------------------------------------


def gradients_partial_on_unused_axes(sharding: Sharding, operand: Operand) -> Layout:
    """Wrong: takes replicated compute for a partial sum."""
    right = gradient_layout(sharding, operand)
    used = {axis for axes in sharding.values() for axis in axes}
    return replace(right, partial=right.partial | (frozenset(("cp", "tp_kv")) - used))


def gradients_never_partial(sharding: Sharding, operand: Operand) -> Layout:
    return gradient_layout(sharding, operand).resolved()


def outputs_never_partial(op: Operator, sharding: Sharding) -> Layout:
    return output_layout(op, sharding).resolved()


@pytest.mark.parametrize(
    "algebra",
    [
        Algebra(promotes=False),
        Algebra(gradient_layout=gradients_partial_on_unused_axes),
        Algebra(gradient_layout=gradients_never_partial),
        Algebra(output_layout=outputs_never_partial),
        Algebra(redistribute=lambda source, target: ()),
    ],
    ids=["no division on promotion", "unused axes partial", "gradients whole", "outputs whole", "nothing sent"],
)
def test_a_wrong_rule_is_found(algebra):
    random = np.random.default_rng(11)
    mesh = SimulatedMesh({"cp": 2, "tp_kv": 2})

    def checks_150_graphs() -> None:
        for _ in range(150):
            check(mesh, *random_graph(mesh, random), algebra)

    with pytest.raises(AssertionError):
        checks_150_graphs()


def test_a_tied_weight_is_reduced_over_the_axes_of_all_its_uses():
    """Two operators read it, each partial on other axes: both are promoted, added and reduced once."""
    mesh = SimulatedMesh({"cp": 2, "tp_kv": 3})
    maker = GraphMaker(size=6, random=np.random.default_rng(4))
    weight = maker.leaf(2)
    maker.op("einsum", [(maker.leaf(2), "bh"), (weight, "fh")], "bf")
    maker.op("einsum", [("op0.out", "bh"), (weight, "fh")], "bf")
    for first, second in (({"b": ("cp",)}, {"b": ("tp_kv",)}), ({"b": ("cp", "tp_kv")}, {}), ({}, {"b": ("cp",)})):
        check(mesh, maker, {"op0": first, "op1": second})
        tied = next(p for p in derive(maker.graph(), {"op0": first, "op1": second}).parameters if p.name == weight)
        assert tied.gradient_axes == {axis for axes in (*first.values(), *second.values()) for axis in axes}
