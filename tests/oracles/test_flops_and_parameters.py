"""FLOPs of compiled programs against 6 N T and the attention term; parameters of graphs against the models' counts."""

import numpy as np
import pytest

from perfmodel.cost.evaluate import microbatch_cost
from perfmodel.cost.program import PHASES
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, load_rule_set
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from perfmodel.workload.models import list_models, load_model
from perfmodel.workload.transformer import build_graph
from tests.cost.jobs import estimator_of, make_job

MODELS = ("gpt2", "llama-3-8b", "gpt3-175b", "falcon-7b", "qwen3-8b", "gemma-7b", "megatron-22b", "phi-2", "mistral-7b")


def flops(name, seq_len, attention, *, tp=1, cp=1, micro_batch=2.0):
    """[region, phase] FLOP of one microbatch on one chip; the layer region is one layer."""
    job = make_job(load_model(name), batch=8, seq_len=seq_len)
    estimator = estimator_of(job)
    program = estimator.programs.program("megatron", attention, DEFAULT_RECOMPUTE_OPERATORS)
    degrees = {"tp": tp, "cp": cp}
    grid = make_grid(
        {axis: [degrees.get(axis, 1)] for axis in DEFAULT_ORDER},
        [DEFAULT_ORDER],
        tier_sizes=(4, 4096),
        num_key_value_heads=job.model.num_key_value_heads,
    )
    return microbatch_cost(program, estimator.machine, grid, np.array([micro_batch]), float(seq_len)).flops[:, 0].reshape(3, len(PHASES))


def passes(name, *arguments, **options):
    """Forward and backward FLOP of the whole model."""
    by_phase = flops(name, *arguments, **options)
    layers = load_model(name).num_hidden_layers
    total = by_phase * np.array([[1.0], [float(layers)], [1.0]])
    backward = PHASES.index("backward")
    return float(total[:, :backward].sum()), float(total[:, backward].sum())


def multiplied(model):
    """Elements of the matrices that multiply every token: all two-dimensional weights of the layers, and the output matrix."""
    matrices = sum(shape.num_elements for shape in model.layer_shapes() if len(shape.shape) == 2)
    return model.num_hidden_layers * matrices + model.vocab_size * model.hidden_size


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seq_len", [512, 1024])
def test_unfused_attention(name, seq_len):
    """Forward 2 N T and 4 L s^2 H Q on the full square, backward twice that: 6 N T and the 12 L H Q s of PaLM, appendix B."""
    model, b = load_model(name), 2
    tokens = b * seq_len
    forward, backward = passes(name, seq_len, AttentionKernel.UNFUSED)
    square = 4 * model.num_hidden_layers * tokens * seq_len * model.num_attention_heads * model.head_dim
    assert forward == 2 * multiplied(model) * tokens + square
    assert backward == 2 * forward
    palm = (6 * multiplied(model) + 12 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * seq_len) * tokens
    assert forward + backward == palm


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mistral-7b"])
def test_fused_attention(name):
    """Two products of the causal half forward, five backward (scores again, four gradients): Dao 2023 (arXiv 2307.08691), section 4."""
    model, b, s = load_model(name), 2, 1024
    forward, backward = passes(name, s, AttentionKernel.FLASH)
    product = 2 * model.num_hidden_layers * b * s * s * model.num_attention_heads * model.head_dim / 2
    assert forward == 2 * multiplied(model) * b * s + 2 * product
    assert backward == 4 * multiplied(model) * b * s + 5 * product


@pytest.mark.parametrize("name, tp, cp", [("gpt2", 2, 1), ("llama-3-8b", 8, 2), ("llama-3-8b", 16, 4), ("gpt3-175b", 8, 4)])
@pytest.mark.parametrize("attention", AttentionKernel)
def test_ranks_share_the_work(name, tp, cp, attention):
    """tp * cp ranks do what one chip does, and no more: also where tp exceeds the key-value heads but for the copies of k and v,
    and where the vocabulary is padded."""
    model = load_model(name)
    alone = passes(name, 1024, attention)
    shared = passes(name, 1024, attention, tp=tp, cp=cp)
    padding = 2 * 2 * 1024 * model.hidden_size * (-model.vocab_size % tp)
    copies = 0
    if tp > model.num_key_value_heads:
        extra = tp // model.num_key_value_heads - 1
        copies = 2 * 2 * 1024 * model.num_hidden_layers * extra * 2 * model.num_key_value_heads * model.head_dim * model.hidden_size
    assert shared[0] * tp * cp == pytest.approx(alone[0] + padding + copies, rel=1e-14)
    assert shared[1] * tp * cp == pytest.approx(alone[1] + 2 * (padding + copies), rel=1e-14)


# --- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("rule_set", ["megatron", "megatron-sp"])
def test_parameters_of_the_graph_are_the_model_s(name, rule_set):
    model = load_model(name)
    graph = build_graph(
        model,
        seq_len=min(512, model.positions.max_position_embeddings),
        attention="flash",
        dropout=True,
        activation_bytes=2.0,
        parameter_bytes=2.0,
    )
    parameters = derive(graph, apply_rules(graph, load_rule_set(rule_set))).parameters
    counts = {kind.name: kind.count for kind in model.layer_kinds}
    assert sum(p.num_elements * counts.get(p.regions[0], 1) for p in parameters) == model.num_parameters + model.num_mtp_parameters
    for kind in model.layer_kinds:
        counted = sorted((p.name, p.num_elements) for p in parameters if p.regions == (kind.name,))
        assert counted == sorted((model.prefix_of(kind) + shape.name, shape.num_elements) for shape in model.layer_shapes(kind))
    assert len({p.name for p in parameters}) == len(parameters)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "falcon-7b"])
def test_elements_on_the_chips_add_up(name):
    """Without any parallelism the fullest chip holds them all, in the estimator as in the model; the tied matrix once."""
    from tests.cost.jobs import predict

    model = load_model(name)
    memory = predict(estimator_of(make_job(model, batch=1), chips=1)).memory
    assert memory["weights"] == 2 * model.num_parameters
    assert memory["optimizer"] == 12 * model.num_parameters
