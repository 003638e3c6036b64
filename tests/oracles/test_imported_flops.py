"""FLOPs of an imported graph are those of torch's own counter on the same module, its parameters the sum of numel."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import perfmodel
from perfmodel.execute.importer.import_graph import shipped
from tests.execute.per_operator.networks import LanguageLSTM, OddProducts, SmallAlexNet, SmallResNet
from tests.marks import mostly_nightly

aten = torch.ops.aten


def _attention(query, key, value, *_, **__):
    return sdpa_flop_count(query, key, value)


#: Torch has no formula for its CPU kernel: this is its own for the others.
CPU_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def torch_flops(module, *inputs):
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        module(*inputs)
    return counter.get_total_flops()


def images(*shape):
    return torch.zeros(shape)


def numbers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


SMALL = {
    "alexnet": (SmallAlexNet, "images=float32[4,3,96,96] labels=int64[4]", lambda: (images(4, 3, 96, 96), numbers(4))),
    "resnet": (SmallResNet, "float32[4,3,64,64]", lambda: (images(4, 3, 64, 64),)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(64, 4, 128), "float32[10,4,64]", lambda: (images(10, 4, 64),)),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(64, 4, 128, batch_first=True),
        "tgt=float32[4,10,64] memory=float32[4,12,64]",
        lambda: (images(4, 10, 64), images(4, 12, 64)),
    ),
    "lstm": (LanguageLSTM, "tokens=int64[4,10] labels=int64[4,10]", lambda: (numbers(4, 10), numbers(4, 10))),
    "bidirectional gru": (lambda: nn.GRU(8, 16, 2, bidirectional=True), "float32[10,4,8]", lambda: (images(10, 4, 8),)),
    "odd products": (OddProducts, "float32[2,8,12,12]", lambda: (images(2, 8, 12, 12),)),
    "attention weights": (lambda: nn.MultiheadAttention(32, 4, batch_first=True),
                          "query=float32[2,6,32] key=float32[2,6,32] value=float32[2,6,32]", lambda: (images(2, 6, 32),) * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_flops_and_parameters_are_torchs(name):
    make, inputs, tensors = SMALL[name]
    graph = perfmodel.import_graph(make, inputs)
    module = make()
    with torch.backends.mkldnn.flags(enabled=False):  # whose recurrent layers are one kernel that torch does not count
        assert graph.flops == torch_flops(module, *tensors())
    assert graph.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert sum(row.flops for row in graph.totals()) == graph.flops
    assert graph.unrecognised() == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly(["gpt2", "llama-3-8b"], ["gpt2"]))
def test_shipped_models_at_full_size(name):
    graph = perfmodel.import_graph(f"perfmodel.execute.importer.import_graph:shipped({name!r})", "int64[1,1024]")
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = shipped(name)
        assert graph.flops == torch_flops(module, numbers(1, 1024))
    assert graph.num_parameters == perfmodel.load_model(name).num_parameters
    assert graph.unrecognised() == ()


def test_an_operator_without_a_rule_has_the_work_that_torch_counts():
    class Solves(nn.Module):
        def forward(self, x):
            return torch.chain_matmul(x, x, x)

    graph = perfmodel.import_graph(Solves, "float32[8,8]")
    assert graph.flops == torch_flops(Solves(), images(8, 8)) > 0
