"""Activation memory, to the byte, against the formulas of Korthikanti et al. 2022 (arXiv 2205.05198), section 4, table 2.

Theirs is for 16-bit activations, unfused attention and dropout. Ours keeps one thing more, which is subtracted as its own term: the mean
and the reciprocal deviation of each token at each norm, in fp32. (Formulas with 5as/h are written without the division, which is not
exact in floating point for 22B.)
"""

import pytest

from perfmodel.cost.estimate import evaluate_plan
from perfmodel.cost.memory.moments import At, activation_terms
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.job import Precision
from perfmodel.workload.models import load_model
from tests.cost.jobs import estimator_of, make_job, make_model, profile_of

#: Table 3 of the paper: layers, heads, hidden size; sequence 2048.
MODELS = {
    "megatron-22b": (48, 64, 6144),
    "gpt3-175b": (96, 96, 12288),
    "megatron-530b": (105, 128, 20480),
    "megatron-1t": (128, 160, 25600),
}
models = pytest.mark.parametrize("name", MODELS)
micro_batches = pytest.mark.parametrize("b", [1, 4])
tensor_degrees = pytest.mark.parametrize("t", [1, 2, 8])

FP32 = 4
EMBEDDING, LAYER, HEAD = range(3)


def row_of(name, *, b=1, t=1, batch=64, chips=None, **knobs):
    """The plan's terms, under the megatron profile with unfused attention in fp16."""
    model = load_model(name) if isinstance(name, str) else name
    job = make_job(model, batch=batch, seq_len=2048, precision=Precision.FP16_MIXED)
    chips = chips or t * knobs.get("pp", 1)
    estimator = estimator_of(job, chips=chips, node=8, profile="megatron")
    knobs = {"sequence_parallel": False, "recompute": "none", "attention": "unfused"} | knobs
    return evaluate_plan(estimator, make_plan(job, cluster="test", num_chips=chips, tp=t, micro_batch=b, **knobs))


def kept(row, recompute="none"):
    """Bytes of one microbatch by region."""
    columns = row.columns.plans
    terms = activation_terms(columns.micro, Recompute(recompute), profile_of("megatron"), columns.grid.degree["tp"])
    return [float(x[0]) for x in terms.kept]


def statistics(s, b, *, norms, ways=1):
    """fp32 mean and reciprocal standard deviation of each token."""
    return norms * 2 * FP32 * s * b / ways


def sizes(name):
    _, a, h = MODELS[name]
    model = load_model(name)
    assert (model.num_hidden_layers, model.num_attention_heads, model.hidden_size) == MODELS[name]
    return 2048, a, h


@models
@micro_batches
def test_equation_1_no_parallelism(name, b):
    s, a, h = sizes(name)
    layer = kept(row_of(name, b=b))[LAYER] - statistics(s, b, norms=2)
    assert layer == s * b * (34 * h + 5 * a * s)


@models
@micro_batches
@tensor_degrees
def test_equation_2_tensor_parallelism(name, b, t):
    s, a, h = sizes(name)
    layer = kept(row_of(name, b=b, t=t))[LAYER] - statistics(s, b, norms=2)
    assert layer == s * b * (10 * h + 24 * h / t + 5 * a * s / t)


@models
@micro_batches
@pytest.mark.parametrize("t", [2, 8])
def test_equation_4_sequence_parallelism(name, b, t):
    s, a, h = sizes(name)
    layer = kept(row_of(name, b=b, t=t, sequence_parallel=True))[LAYER] - statistics(s, b, norms=2, ways=t)
    assert layer == s * b / t * (34 * h + 5 * a * s)


@models
@micro_batches
@pytest.mark.parametrize("t", [2, 8])
def test_equation_6_selective_recomputation(name, b, t):
    s, _, h = sizes(name)
    row = row_of(name, b=b, t=t, sequence_parallel=True, recompute="selective")
    assert kept(row, "selective")[LAYER] - statistics(s, b, norms=2, ways=t) == 34 * s * b * h / t
    row = row_of(name, b=b, t=t, recompute="selective")
    assert kept(row, "selective")[LAYER] - statistics(s, b, norms=2) == s * b * h * (10 + 24 / t)


@models
@micro_batches
@tensor_degrees
def test_full_recomputation(name, b, t):
    s, _, h = sizes(name)
    assert kept(row_of(name, b=b, t=t, recompute="full"), "full")[LAYER] == 2 * s * b * h


@pytest.mark.parametrize("t", [1, 8])
def test_outside_the_layers(t):
    """Section 4.3: dropout after the embedding s b h; the last norm 2 s b h; the output layer 2 s b h, and 4 s b v of fp32 logits."""
    s, _, h = sizes("megatron-22b")
    b, v = 2, 51200
    outside = kept(row_of(make_22b(v), b=b, t=t, sequence_parallel=t > 1))
    assert outside[EMBEDDING] == s * b * h / t
    assert outside[HEAD] - statistics(s, b, norms=1, ways=t) == 4 * s * b * h / t * (1 + v / h)


def make_22b(vocab_size):
    return make_model(
        num_hidden_layers=48, hidden_size=6144, num_attention_heads=64, num_key_value_heads=64, head_dim=96, intermediate_size=24576,
        vocab_size=vocab_size, max_position_embeddings=2048,
    )  # fmt: skip


@pytest.mark.parametrize("p, v, m", [(8, 3, 64), (8, 1, 64), (35, 3, 280), (64, 1, 512)])
def test_first_stage(p, v, m):
    """Sections 4.2.3 and 4.3: L layers' activations, interleaved L (1 + (p - 1)/(p v)), and the dropout masks of p microbatches."""
    name = "megatron-530b" if p == 35 else "megatron-1t" if p == 64 else "gpt3-175b"
    s, a, h = sizes(name)
    layers, b, t = MODELS[name][0], 1, 8
    row = row_of(
        name, b=b, t=t, pp=p, batch=m, sequence_parallel=True, virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b",
    )  # fmt: skip
    activations = float(row.memory_row.kept[0][At.BLOCKS][0])
    share = 1 + (p - 1) / (p * v) if v > 1 else 1
    norms = statistics(s, b, norms=2, ways=t) * layers * share
    # the paper counts p microbatches; interleaved, pp - 1 first passes more run ahead
    masks = s * b * h / t * (2 * p - 1 if v > 1 else p)
    layer_bytes = s * b * h / t * (34 + 5 * a * s / h)
    assert activations - norms - masks == pytest.approx(layers * share * layer_bytes, rel=1e-14)


def test_figures_of_section_5():
    """5 a s / h is 80 for GPT-3 and 64 for MT-NLG 530B; selective recomputation saves 70 % and 65 % of the activation memory."""
    for name, term, saved in (("gpt3-175b", 80, 0.70), ("megatron-530b", 64, 0.65)):
        s, a, h = sizes(name)
        assert 5 * a * s / h == term
        none, selective = (kept(row_of(name, t=8, sequence_parallel=True, recompute=r), r)[LAYER] for r in ("none", "selective"))
        assert 1 - selective / none == pytest.approx(saved, abs=0.005)
