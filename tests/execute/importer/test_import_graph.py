"""A torch module as operators over named dims: kinds, dims, links, and the error messages of bad modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.workload.imported.aten_rules import RULES
from perfmodel.workload.imported.graph import REPLICATED, ImportedKind
from perfmodel.workload.imported.iteration_space import IterationSpace
from tests.execute.per_operator.networks import LanguageLSTM, NeedsASize, OddProducts, SmallAlexNet, SmallResNet, WithFourier

HERE = "tests.execute.per_operator.networks"


def vertices_of(graph, kind):
    return [vertex for vertex in graph.vertices if vertex.kind is kind]


def links_between(graph, producer, consumer):
    (reader,) = [vertex for vertex in graph.vertices if vertex.name == consumer]
    (read,) = [operand for operand in reader.inputs if operand.producer and graph.vertices[operand.producer[0]].name == producer]
    return [(link.producer, link.consumer, link.size) for link in read.links]


def test_a_convolutional_network():
    graph = perfmodel.import_graph(SmallAlexNet, "images=float32[4,3,96,96] labels=int64[4]")
    first = vertices_of(graph, ImportedKind.CONVOLUTION)[0]
    assert dict(first.dims) == {"b": 4, "c": 3, "n": 8, "h": 23, "w": 23, "r": 11, "s": 11}
    assert [operand.dims for operand in first.inputs] == [("b", "c", "h", "w"), ("n", "c", "r", "s"), ("n",)]
    assert first.module == "features.0"
    assert first.unsplit == ("r", "s")
    counted = {row.kind: row.num_operators for row in graph.totals()}
    assert counted[ImportedKind.CONVOLUTION] == 3
    assert counted[ImportedKind.MATMUL] == 2
    assert counted[ImportedKind.POOLING] == 3
    assert counted[ImportedKind.CROSS_ENTROPY] == 1


def test_flattened_dims_keep_their_order():
    graph = perfmodel.import_graph(SmallAlexNet, "images=float32[4,3,96,96] labels=int64[4]")
    links = links_between(graph, "adaptive_avg_pool2d", "dropout")
    assert links == [("b", "b", 4), ("c", "d", 16), ("h", "d", 2), ("w", "d", 2)]


def test_in_place_operators_hand_on_their_result():
    graph = perfmodel.import_graph(SmallResNet, "float32[4,3,64,64]")
    sums = [vertex for vertex in graph.vertices if vertex.operator == "aten.relu_.default" and vertex.chain > 1]
    assert len(sums) == 2  # y += shortcut and the ReLU after it are one vertex each
    assert [vertex.activation_bytes for vertex in sums] == [0.0, 0.0]
    assert [len(vertex.inputs) for vertex in sums] == [2, 2]
    assert len(vertices_of(graph, ImportedKind.BATCH_NORM)) == 6


@pytest.mark.slow
def test_heads_are_found_in_the_projection(tmp_path):
    config, llama = tmp_path / "config.json", Path(perfmodel.__file__).parent / "workload" / "models" / "llama-3-8b.json"
    config.write_text(json.dumps(json.loads(llama.read_text(encoding="utf-8")) | {"num_hidden_layers": 2}), encoding="utf-8")
    graph = perfmodel.import_graph(f"perfmodel.execute.importer.import_graph:shipped('{config}')", "int64[1,256]")
    (attention, *others) = vertices_of(graph, ImportedKind.ATTENTION)
    assert len(others) == 1
    assert dict(attention.dims) == {"b": 1, "h": 32, "s": 256, "d": 128, "z": 256, "e": 128}
    value = attention.inputs[2]
    assert graph.vertices[value.producer[0]].module.endswith("attention.v_proj")
    runs = [(link.producer, link.producer_inner, link.consumer, link.size) for link in value.links]
    assert runs == [("n", 128, "h", 8), ("s", 1, "z", 256), ("n", 1, "e", 128)]


def test_an_lstm_stays_one_operator():
    graph = perfmodel.import_graph(LanguageLSTM, "tokens=int64[4,10] labels=int64[4,10]")
    (lstm,) = vertices_of(graph, ImportedKind.RECURRENT)
    assert dict(lstm.dims) == {"l": 2, "b": 4, "s": 10, "d": 16, "e": 32}
    assert lstm.unsplit == ("s",)


def test_shared_and_unread_parameters():
    graph = perfmodel.import_graph(OddProducts, "float32[2,8,12,12]")
    assert [name for name in graph.unused_parameters if "unread" in name] == ["unread.weight", "unread.bias"]
    assert "same.weight" not in {parameter.name for parameter in graph.parameters}
    readers = [vertex.name for vertex in graph.vertices for operand in vertex.inputs if operand.parameter == "one.weight"]
    assert len(readers) == 2


def test_what_has_no_rule_is_listed_and_replicated():
    graph = perfmodel.import_graph(WithFourier, "float32[4,8]")
    (summary,) = graph.unrecognised()
    assert (summary.operator, summary.num_operators, summary.treatment) == ("aten.fft_rfft.default", 1, REPLICATED)
    (vertex,) = vertices_of(graph, ImportedKind.UNRECOGNISED)
    assert dict(vertex.dims) == {}


def test_a_new_operator_is_one_rule(monkeypatch):
    def transform(call):
        (x,), (y,) = call.tensors.values(), call.outputs
        return IterationSpace(
            kind=ImportedKind.REARRANGE, dims={"b": x[0], "f": y[1]}, reads={"self": ("b", "")}, writes=(("b", "f"),), unsplit=("f",)
        )

    monkeypatch.setitem(RULES, "fft_rfft", transform)
    graph = perfmodel.import_graph(WithFourier, "float32[4,8]")
    assert graph.unrecognised() == ()
    (vertex,) = vertices_of(graph, ImportedKind.REARRANGE)
    assert dict(vertex.dims) == {"b": 4, "f": 5}


def test_bags_and_picked_entries():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(100, 8)

        def forward(self, indices, places):
            return torch.gather(self.bag(indices), 1, places), torch.nn.functional.one_hot(places, 8)

    graph = perfmodel.import_graph(Picks, "int64[4,5] int64[4,2]")
    assert graph.unrecognised() == ()
    (bag,) = vertices_of(graph, ImportedKind.EMBEDDING)
    assert dict(bag.dims) == {"b": 4, "v": 100, "d": 8}
    assert links_between(graph, "indices", bag.name) == [("a", "b", 4), ("b", "b", 5)]


def test_a_part_of_a_parameter_is_that_parameter():
    graph = perfmodel.import_graph("torch.nn:TransformerDecoderLayer(32, 4, batch_first=True)", "float32[4,6,32] float32[4,8,32]")
    (row,) = [row for row in graph.totals() if row.kind is ImportedKind.MATMUL]
    norms = [row.num_parameters for row in graph.totals() if row.kind is ImportedKind.NORM]
    assert row.num_parameters + sum(norms) == graph.num_parameters
    read = [operand.parameter for vertex in graph.vertices for operand in vertex.inputs]
    assert read.count("multihead_attn.in_proj_weight") == 2  # the rows of q, and those of k and v


def test_positions_of_parameters_are_followed():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 8, 8))

        def forward(self, x):
            return x @ self.weight[1].t()

    graph = perfmodel.import_graph(Turned, "float32[4,8]")
    (product,) = vertices_of(graph, ImportedKind.MATMUL)
    weight = product.inputs[1]
    assert weight.dims == ("k", "n")
    assert [(link.positions, link.producer, link.consumer, link.size) for link in weight.links] == [((2,), "", "k", 8), ((1,), "", "n", 8)]


def test_integer_tensors_are_distinguished_from_floats():
    graph = perfmodel.import_graph(LanguageLSTM, "tokens=int64[4,10] labels=int64[4,10]")
    assert [vertex.outputs[0].is_index for vertex in graph.vertices[:3]] == [True, True, False]


def test_merged_rows_of_a_linear_layer_keep_their_dims():
    class Flattens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x):
            return self.linear(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (5, 4)).relu()

    graph = perfmodel.import_graph(Flattens, "float32[4,5,8]")
    (linear,) = vertices_of(graph, ImportedKind.MATMUL)
    assert dict(linear.dims) == {"b": 5, "s": 4, "n": 16, "c": 8}
    assert links_between(graph, "x", "linear") == [("b", "b", 5), ("a", "s", 4), ("c", "c", 8)]
    assert links_between(graph, "linear", "relu") == [("b", "b", 5), ("s", "s", 4), ("n", "d", 16)]


def test_a_module_that_exists_and_a_factory_give_the_same_graph():
    by_name = perfmodel.import_graph(f"{HERE}:NeedsASize(8)", "float32[2,8]")
    assert by_name.vertices == perfmodel.import_graph(NeedsASize(8), "float32[2,8]").vertices
    assert by_name.vertices == perfmodel.import_graph(lambda: NeedsASize(size=8), ["x=fp32[2, 8]"]).vertices


def test_precision_of_the_parameters_counts():
    graph = perfmodel.import_graph(lambda: NeedsASize(8).to(torch.bfloat16), "bf16[2,8]")
    assert graph.parameter_bytes == 2 * (8 * 8 + 8)
    assert graph.activation_bytes == 2 * 2 * 8


def test_a_shared_parameter_stays_shared_when_converted():
    graph = perfmodel.import_graph(lambda: OddProducts().half().float(), "float32[2,8,12,12]")
    assert graph.num_parameters == perfmodel.import_graph(OddProducts, "float32[2,8,12,12]").num_parameters


def test_it_leaves_the_search_path_alone():
    before = list(sys.path)
    perfmodel.import_graph("torch.nn:Linear(8, 8)", "float32[2,8]")
    assert sys.path == before


@pytest.mark.parametrize(
    ("module", "inputs", "sentence"),
    [
        ("nonsense", "", "must be a Python module, a colon"),
        ("no_such_package.nets:Net", "", "there is no Python module 'no_such_package'"),
        (f"{HERE}:SmallAlexnet", "", "has no 'SmallAlexnet'; did you mean 'SmallAlexNet'"),
        (f"{HERE}:NeedsASize(x)", "", "a call with plain numbers and strings"),
        (
            f"{HERE}:NeedsASize",
            "float32[2,8]",
            "; write its arguments behind it, as in tests.execute.per_operator.networks:NeedsASize(...)",
        ),
        (f"{HERE}:broken", "", "its factory failed: RuntimeError: no such checkpoint; call it by itself to see where"),
        (f"{HERE}:not_a_module", "", "must give a torch.nn.Module, not str"),
        (f"{HERE}:DependsOnValues", "float32[2,8]", "torch.export cannot follow it: GuardOnDataDependentSymNode"),
        (f"{HERE}:DependsOnValues", "float32[2,8]", "; take out what depends on the values of tensors"),
        (f"{HERE}:WithFourier", "float32[2,9]", "its forward fails on these inputs: RuntimeError: "),
        (f"{HERE}:WithFourier", "float32[2,9]", "; call it with types and sizes that it takes (inputs=float32[2,9])"),
        (f"{HERE}:torc", "float32[2,9]", f"{HERE} has no 'torc'; use one of "),
        (f"{HERE}:WithFourier", "y=float32[2,8]", "inputs=y: is no argument of WithFourier.forward"),
        (f"{HERE}:WithFourier", "", "missing a required argument: 'x'"),
        (f"{HERE}:WithFourier", "float32[2,8] float32[2,8]", "too many positional arguments"),
    ],
)
def test_bad_input_is_one_sentence(module, inputs, sentence, capfd):
    with pytest.raises(InputError, match=r"^[^\n]*$") as raised:
        perfmodel.import_graph(module, inputs)
    assert sentence in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.nightly
def test_llama_70b_in_a_minute_and_four_gigabytes():
    script = """
import resource, time, perfmodel
start = time.process_time()
graph = perfmodel.import_graph("perfmodel.execute.importer.import_graph:shipped('llama-3-70b')", "int64[1,8192]")
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, graph.num_parameters)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=True)
    took, memory, parameters = map(float, done.stdout.split())
    assert took < 60
    assert memory < 4e9
    assert parameters == perfmodel.load_model("llama-3-70b").num_parameters


def test_dropout_and_casts_are_elementwise():
    class Casts(nn.Module):
        def forward(self, x):
            return torch.dropout(x.to(torch.bfloat16), 0.5, True).to(torch.bfloat16)

    graph = perfmodel.import_graph(Casts, "float32[4,8]")
    (vertex,) = vertices_of(graph, ImportedKind.ELEMENTWISE)
    assert vertex.chain == 2
    assert vertex.activation_bytes == 2 * (2 * 4 * 8)
