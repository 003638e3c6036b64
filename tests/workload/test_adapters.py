"""Adapters-only training: what is trained, what runs backward, what is kept; a text and its faults."""

from dataclasses import replace
from math import prod

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.workload.adapters import FIRST, regions_in_training, with_training
from perfmodel.workload.base_formats import NF4_BYTES
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.models import load_model
from perfmodel.workload.training import FULL_TRAINING, Method, Training, frozen_parameter_bytes, num_trained_parameters, training_of
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Product, Stream

SEQ_LEN = 64


def graph_of(model, train, attention="flash"):
    graph = build_graph(model, seq_len=SEQ_LEN, attention=attention, dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    return with_training(graph, training_of(train))


def flops(works):
    def size(extent):
        return prod(length for length, _ in extent)

    return sum(2 * size(work.batch) * size(work.m) * size(work.n) * size(work.k) for work in works if isinstance(work, Product))


def flops_of(graph, name, of="backward"):
    return flops(getattr(graph.operator(name), of))


@pytest.mark.parametrize(
    "train, trained",
    [
        ("lora:16:q_proj+v_proj", 8_388_608),
        ("lora:16", 39_976_960),
        ("lora:64:all-linear", 159_907_840),
        ("qlora:16", 39_976_960),
        ("dora:16:q_proj+v_proj", 8_650_752),
    ],
)
def test_llama_2_7b_has_as_many_trainable_parameters_as_peft_prints(train, trained):
    model = load_model("llama-2-7b")
    graph = graph_of(model, train)
    assert graph.num_trained_parameters == trained == num_trained_parameters(model, training_of(train))
    assert graph.num_parameters == 6_738_415_616 + trained


@pytest.mark.parametrize("name", ["gpt2", "gpt-j-6b", "gemma-2-9b", "falcon-40b", "bloom-176b", "olmo-2-7b"])
@pytest.mark.parametrize("train", ["lora:8", "qlora:8:up_proj", "dora:8"])
def test_every_family_takes_adapters(name, train):
    model, how = load_model(name), training_of(train)
    graph = graph_of(model, train)
    assert graph.num_trained_parameters == num_trained_parameters(model, how)
    assert graph.num_parameters == model.num_parameters + graph.num_trained_parameters
    assert graph.regions == regions_in_training(model, how)
    uses = graph.readers()
    frozen = [tensor for tensor in graph.parameters if not tensor.has_gradient]
    runs = [graph.count(graph.operators[uses[tensor.name][0][0]].layer) for tensor in frozen]
    stored = sum(tensor.num_elements * tensor.itemsize * times for tensor, times in zip(frozen, runs, strict=True))
    assert stored == frozen_parameter_bytes(model, how, 2.0)


def test_a_frozen_linear_operator_costs_four_parts_of_six():
    """By hand, of h = 4096, f = 11008, rank 16 and 64 tokens; attention's scores cost what they cost."""
    model = load_model("llama-2-7b")
    graph, full = graph_of(model, "lora:16", "unfused"), graph_of(model, "full", "unfused")
    forward = 2 * SEQ_LEN * 4096 * 11008
    assert flops_of(graph, "up_proj", "forward") == forward == flops_of(graph, "up_proj")
    assert flops_of(full, "up_proj") == 2 * forward
    adapter = 2 * SEQ_LEN * 16 * (4096 + 11008)
    assert flops_of(graph, "up_proj_lora_a", "forward") + flops_of(graph, "up_proj_lora_b", "forward") == adapter
    assert flops_of(graph, "up_proj_lora_a") + flops_of(graph, "up_proj_lora_b") == 2 * adapter
    for name in ("scores", "context"):
        assert flops_of(graph, name) == flops_of(full, name) == 2 * flops_of(full, name, "forward")
    head = 2 * SEQ_LEN * 4096 * 32000
    assert flops_of(graph, "lm_head") == head == flops_of(full, "lm_head") / 2


def test_nothing_runs_backward_below_the_first_adapter():
    graph = graph_of(load_model("llama-2-7b"), "lora:16")
    below = [op.name for op in graph.operators if op.forward and not op.backward and not op.passes_gradient]
    assert below == ["token_embedding", *(f"{FIRST}.{name}" for name in ("attention_norm", "q_proj", "k_proj", "v_proj"))]
    assert [flops_of(graph, f"{FIRST}.{name}") for name in ("q_proj_lora_a", "q_proj_lora_b")] == [
        2 * SEQ_LEN * 16 * 4096,  # of the first matrix its own gradient alone
        2 * 2 * SEQ_LEN * 16 * 4096,
    ]
    one = graph_of(load_model("llama-2-7b").with_layers(1), "lora:16:o_proj")
    assert not any(one.operator(f"{FIRST}.{name}").backward for name in ("q_proj", "attention", "o_proj"))
    assert one.operator(f"{FIRST}.up_proj").backward


def test_what_only_a_frozen_weight_would_read_is_not_kept():
    graph = graph_of(load_model("llama-2-7b"), "lora:16:q_proj+v_proj")
    assert graph.operator("up_proj").saved == graph.operator("q_proj").saved == graph.operator("lm_head").saved == ()
    assert [data.of for data in graph.operator("q_proj_lora_a").saved] == [0]
    assert [data.of for data in graph.operator("gate_product").saved] == [0, 1]


def test_four_bit_weights_are_made_into_bf16_whenever_they_are_multiplied_with():
    graph = graph_of(load_model("llama-2-7b"), "qlora:16")
    assert pytest.approx(4.127, abs=1e-3) == NF4_BYTES * 8  # QLoRA, section 3: .127 bits for scales
    operator, elements = graph.operator("up_proj"), 4096 * 11008
    for works in (operator.forward, operator.backward):
        (stream,) = (work for work in works if isinstance(work, Stream))
        assert [(prod(size for size, _ in data.extent), data.itemsize) for data in stream.accesses] == [
            (elements, NF4_BYTES),
            (elements, 2.0),
        ]
    assert not any(isinstance(work, Stream) for work in graph.operator(f"{FIRST}.q_proj").backward)
    assert {graph.tensors[name].itemsize for name in ("lm_head.weight", "mlp_norm.weight", "up_proj_lora_a.weight")} == {2.0}


def test_full_training_is_the_graph_itself():
    graph = build_graph(load_model("gpt2"), seq_len=SEQ_LEN, attention="flash", dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    assert with_training(graph, FULL_TRAINING) is graph


@pytest.mark.parametrize("text", ["full", "lora:16", "qlora:8", "lora:4:q_proj+v_proj"])
def test_a_text_is_read_back(text):
    assert str(training_of(text)) == text


@pytest.mark.parametrize(
    "text, message",
    [
        ("lora", "has no rank; write lora:16"),
        ("lora:0", "the rank must be from 1"),
        ("lora:16:q_proj+q_proj", "twice"),
        ("lorra:16", "not known; write full, lora:16"),
        ("full:16", "not known"),
        ("", "not known"),
        (16, "not known"),
    ],
)
def test_what_is_no_training_is_refused(text, message):
    with pytest.raises(InputError, match="train=") as error:
        training_of(text)
    assert message in str(error.value)


def test_a_target_that_the_model_has_not_is_refused():
    job = TrainingJob(model=load_model("gpt2"), global_batch=8, seq_len=64)
    with pytest.raises(InputError, match="gate_proj: is no linear operator of a layer of gpt2"):
        replace(job, train=training_of("lora:16:gate_proj"))
    with pytest.raises(InputError, match="has no adapters"):
        Training(rank=4)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("train", ["lora:8", "qlora:8:attention+experts:int8", "lora:8x4", "dora:8", "qdora:8x4"])
def test_experts_and_layers_of_several_kinds_take_adapters(name, train):
    model, how = load_model(name), training_of(train)
    graph = graph_of(model, train)
    assert graph.num_trained_parameters == num_trained_parameters(model, how)
    assert graph.num_parameters == model.num_parameters + graph.num_trained_parameters
    assert graph.regions == regions_in_training(model, how)


def test_each_expert_has_an_adapter_of_its_own_for_each_of_its_matrices():
    """By hand, of Qwen3-30B-A3B: 48 layers, 128 experts, three matrices of 2048 x 768."""
    model = load_model("qwen3-30b-a3b")
    assert num_trained_parameters(model, training_of("lora:16:experts")) == 48 * 128 * 3 * 16 * (2048 + 768)
    graph = graph_of(model, "lora:16")
    assert graph.tensors["experts_up_lora_a.weight"].shape == (128, 2, 16, 2048)
    products = [work for work in graph.operator("experts_up_lora_a").forward if isinstance(work, Product)]
    assert products
    assert all(work.is_grouped for work in products)
    assert not any("router_lora" in tensor for tensor in graph.tensors)


def test_the_gradient_of_a_repeated_layers_input_is_made_where_layers_are_of_several_kinds():
    graph = graph_of(load_model("deepseek-v2-lite"), "lora:16")
    assert graph.operator("layer.attention_norm").backward


@pytest.mark.parametrize(
    "text, means",
    [
        ("qlora:16", Training(method=Method.QLORA, rank=16, base="nf4-dq")),
        ("qlora:8:all-linear:int8", Training(method=Method.QLORA, rank=8, base="int8")),
        ("qdora:8:all-linear:int8", Training(method=Method.QDORA, rank=8, base="int8")),
        ("lora:16x4", Training(method=Method.LORA, rank=16, num_adapters=4)),
        ("qlora:4:q_proj+v_proj:nf4", Training(method=Method.QLORA, rank=4, targets=("q_proj", "v_proj"), base="nf4")),
    ],
)
def test_a_text_says_adapters_at_a_time_and_the_format_of_the_base(text, means):
    training = training_of(text)
    assert str(training) == text
    assert (training.rank, training.targets, training.num_adapters, training.base) == (
        means.rank,
        means.targets,
        means.num_adapters,
        means.base,
    )


@pytest.mark.parametrize(
    "text", ["lora:16:all-linear:int8", "dora:16:all-linear:int8", "dora", "qlora:16::fp3", "lora:16x0", "lora:16x2000000"]
)
def test_faults_of_such_texts_are_named(text):
    with pytest.raises(InputError):
        training_of(text)


def test_a_norm_is_made_of_the_matrix_and_its_adapter_in_forward_passes_alone():
    """DoRA, section 4.3: a matrix of 4096 x 4096 and rank 16, in addition to the product with the tokens of a sequence."""
    plain, decomposed, quantized = (graph_of(load_model("llama-2-7b"), f"{how}:16").operator("q_proj") for how in ("lora", "dora", "qdora"))
    assert flops(decomposed.forward) - flops(plain.forward) == 2 * 4096 * 4096 * 16
    assert decomposed.backward == plain.backward
    assert len(quantized.forward) == len(decomposed.forward) + 2  # for the product, and for the norm


def test_experts_are_no_target_of_a_model_without_them():
    how = training_of("qlora:16:experts")
    with pytest.raises(InputError, match="attention, mlp"):
        TrainingJob(model=load_model("llama-2-7b"), global_batch=1, seq_len=64, train=how)


@pytest.mark.parametrize(
    ("train", "trained"), [("lora:16:q_proj", "qlora:16:q_proj"), ("dora:8", "qdora:8"), ("full", "full"), ("galore:8", "galore:8")]
)
def test_adapters_on_a_checkpoint_in_4_bits_have_a_quantised_base(train, trained):
    assert training_of(train).on_checkpoint("unsloth/Qwen3-8B-bnb-4bit") == training_of(trained)
    assert training_of(train).on_checkpoint("Qwen/Qwen3-8B") == training_of(train)


def test_the_name_of_a_checkpoint_decides_its_base():
    job = {"cluster": "rtx-4090", "chips": 1, "seq_len": 2048, "global_batch": 8, "profile": "unsloth"}
    by_name, stated = (
        perfmodel.predict(model=model, train=train, **job)
        for model, train in (("unsloth/Qwen3-8B-bnb-4bit", "lora:16"), ("qwen3-8b", "qlora:16"))
    )
    assert by_name.step_time == stated.step_time
    assert by_name.memory == stated.memory
