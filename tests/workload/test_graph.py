"""Operators and graphs refuse what the sharding algebra could not speak about."""

from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Graph, Operand, Operator, Repeat, Tensor, TensorRole
from perfmodel.workload.kinds.dense import einsum
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Data


def linear(**changes) -> Operator:
    x, w, y = Operand(tensor="x", dims=("b", "h")), Operand(tensor="w", dims=("f", "h")), Operand(tensor="y", dims=("b", "f"))
    return replace(einsum("up", x, w, y, dict.fromkeys("bhf", 4), layer="layer"), **changes)


TENSORS = {
    "x": Tensor(name="x", shape=(4, 4), role=TensorRole.INDEX, itemsize=2.0),
    "w": Tensor(name="w", shape=(4, 4), role=TensorRole.PARAMETER, itemsize=2.0, num_rows=1),
    "y": Tensor(name="y", shape=(4, 4), itemsize=2.0),
    "z": Tensor(name="z", shape=(4, 4), itemsize=2.0),
}


def graph(*operators: Operator, tensors: dict[str, Tensor] = TENSORS) -> Graph:
    return Graph(name="g", operators=operators, tensors=tensors, repeats=(Repeat(layer="layer", count=1, carried="y"),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dims": {"b": 4, "h": 0, "f": 4}}, "dim h=0: must be a whole number"),
        ({"output": Operand(tensor="y", dims=("b", "q"))}, "has dim 'q': not a dim"),
        ({"output": Operand(tensor="y", dims=("b", "b"))}, "each may occur once"),
        ({"output": Operand(tensor="y", dims=("b", "h"))}, "'h' is summed over and in the output"),
        ({"roles": DimRoles(padded=("q",))}, "dim 'q': not a dim"),
        ({"scratch": (Data(extent=((4, "q"),)),)}, "an extent has dim 'q'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_an_operator(changes, words):
    with pytest.raises(InputError, match=words):
        linear(**changes)


def test_an_operator_knows_its_dims_and_operands():
    assert linear().size(("b", "f")) == 16
    assert linear(roles=DimRoles(logical={"h": "hidden"})).logical_name("h") == "hidden"
    assert linear().logical_name("h") == "h"
    assert [linear().operands[data.of].tensor for data in linear().saved] == ["x"] == list(linear().kept)


def test_what_is_not_a_graph():
    read = linear(
        name="down",
        inputs=(Operand(tensor="y", dims=("b", "h")), Operand(tensor="w", dims=("f", "h"))),
        output=Operand(tensor="z", dims=("b", "f")),
    )
    assert graph(linear(), read).producer("z") is read
    with pytest.raises(InputError, match="is made after it"):
        graph(read, linear())
    with pytest.raises(InputError, match="made twice"):
        graph(linear(), linear(name="again"))
    with pytest.raises(InputError, match="occurs twice"):
        graph(linear(), replace(read, name="up"))
    with pytest.raises(InputError, match="one for each position of shape"):
        graph(linear(), tensors={**TENSORS, "w": replace(TENSORS["w"], shape=(4,))})
    with pytest.raises(InputError, match="'w' is not in the graph"):
        graph(linear(), tensors={name: t for name, t in TENSORS.items() if name != "w"})


def test_a_graph_knows_what_has_a_gradient():
    assert graph(linear()).trained == {"w"}
    assert graph(linear()).activations_with_gradient == {"y", "z"}  # ids have none
    frozen = graph(linear(), tensors={**TENSORS, "w": replace(TENSORS["w"], has_gradient=False)})
    assert frozen.trained == set()


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "falcon-7b", "gpt-neox-20b", "gemma-2-9b", "opt-13b", "qwen3-8b"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_transformer_parameters_are_the_configs_one_by_one(name, attention):
    """Names and stored shapes, region by region."""
    model = load_model(name)
    built = build_graph(model, seq_len=512, attention=attention, dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    sizes = {}
    for op in built.operators:
        for operand in op.inputs:
            tensor = built.tensors[operand.tensor]
            if tensor.role is TensorRole.PARAMETER:
                rows, columns = op.size(operand.dims[: tensor.num_rows]), op.size(operand.dims[tensor.num_rows :])
                sizes[tensor.name] = (rows, columns) if len(operand.dims) > tensor.num_rows else (rows,)
    shapes = (*model.embedding_shapes(), *model.layer_shapes(), *model.head_shapes())
    assert sizes == {shape.name: shape.shape for shape in shapes}


def test_removing_a_layer_changes_the_count_only():
    model = load_model("llama-3-8b")
    settings = {"seq_len": 512, "attention": "flash", "dropout": True, "activation_bytes": 2.0, "parameter_bytes": 2.0}
    one, all_layers = build_graph(replace(model, num_hidden_layers=1), **settings), build_graph(model, **settings)
    assert one.operators == all_layers.operators
    assert (one.count("layer"), all_layers.count("layer")) == (1, 32)
    assert (one.num_parameters, all_layers.num_parameters) == (replace(model, num_hidden_layers=1).num_parameters, model.num_parameters)
