"""`perfmodel import`: tables, one JSON object, a file, and one sentence for what is wrong."""

import json
import sys

import pytest

LINEAR = ["import", "torch.nn:Linear(8, 16)", "--inputs", "float32[4,8]"]

NET = """
import torch

print("loading")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x, scale):
        return torch.fft.rfft(self.linear(x) * scale).abs()

class Depends(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "own_nets.py").write_text(NET)
    yield
    sys.modules.pop("own_nets", None)


def test_json_has_the_sums(call_json):
    content = call_json(*LINEAR)
    assert content["flops"] == 2 * 4 * 8 * 16
    assert content["num_parameters"] == 8 * 16 + 16
    assert content["parameter_bytes"] == 4 * content["num_parameters"]
    assert content["activation_bytes"] == 4 * 4 * 16
    assert content["unrecognised"] == []
    assert [row["kind"] for row in content["operators"]] == ["matmul"]


def test_a_module_of_this_folder(nets, call):
    code, out, err = call("import", "own_nets:Net", "--inputs", "x=float32[4,8] scale=float32[8]")
    assert (code, err) == (0, "loading\n")  # what the file prints itself does not mix with the result
    assert "matmul" in out
    assert "aten.fft_rfft.default" in out
    assert "replicated: computed whole on every chip" in out


def test_inputs_may_be_given_one_by_one(nets, call):
    code, out, _ = call("import", "own_nets:Net", "--inputs", "scale=float32[8]", "--inputs", "x=float32[4,8]")
    assert code == 0
    assert "torch.export under fake tensors" in out


def test_the_graph_is_saved(call, tmp_path):
    assert call(*LINEAR, "--save", tmp_path / "graph.json")[0] == 0
    graph = json.loads((tmp_path / "graph.json").read_text())
    assert graph["schema_version"] == 2
    assert graph["vertices"][1]["dims"] == {"b": 4, "n": 16, "c": 8}
    link = {"producer": "b", "producer_inner": 1, "consumer": "c", "consumer_inner": 1, "size": 8, "positions": [1]}
    read = graph["vertices"][1]["inputs"][0]
    assert (read["producer"], read["links"][1]) == ([0, 0], link)


def test_the_best_split_is_shown_with_data_parallelism(call, call_json):
    wide = ["import", "torch.nn:Linear(1024, 1024)", "--inputs", "float32[8,1024]", "--search", "4"]
    search = call_json(*wide)["search"]
    assert search["num_devices"] == 4
    assert search["cost_flops"] < search["data_parallel_cost_flops"]
    assert search["times_data_parallel"] == search["data_parallel_cost_flops"] / search["cost_flops"]
    assert search["strategy"][1]["parts"]["b"] == 1
    assert "times less than data parallelism, proved best" in " ".join(call(*wide)[1].split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["import", "torch.nn"], "must be a Python module, a colon"),
        (["import", "no_such_package:Net"], "there is no Python module 'no_such_package'"),
        (["import", "torch.nn:Linnear(8, 8)"], "torch.nn has no 'Linnear'; did you mean 'Linear'"),
        (["import", "torch.nn:Linear(8, 8)"], "missing a required argument: 'input'"),
        (["import", "own_nets:Depends", "--inputs", "float32[8]"], "torch.export cannot follow it: GuardOnDataDependentSymNode"),
        ([*LINEAR[:3], "float32(4,8)"], "inputs=float32(4,8): is not an input; write name=type[size,size]"),
        ([*LINEAR[:3], "flaot32[4,8]"], "flaot32 is no type; did you mean 'float32'"),
        ([*LINEAR[:3], "float32[4,0]"], "0 is no size"),
        ([*LINEAR, "--search", "0"], "search=0: must be a whole number of at least 1"),
        ([*LINEAR, "--save", "no/such/folder.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_sentence(nets, call, arguments, sentence):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.removeprefix("loading\n").count("\n") == 1
    assert sentence in err
