"""FLOP, bytes and traffic of a real model's step, as torch counts them, follow from the sizes of the model, written out here.

Products: 2 FLOP for each weight that a row meets. Attention: 4 FLOP for each query, key and entry of a head (all keys of a sequence, seen
or not). Cache: a constant number of bytes for each token and layer; layers with a window read no more than the window.
"""

import pytest

pytest.importorskip("torch")

from perfmodel.cost.serving.boundness import operator_rows
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.memory import cache_shape, weight_bytes
from perfmodel.execute.serving.run import audit_serving
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.calibration import COLLECTIVE_CODE, SPEC_SHEET
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.results import StepShape
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.workload.models import load_model
from perfmodel.workload.quantization import QUANTIZATIONS
from tests.execute.jobs import tiny
from tests.marks import mostly_nightly, mostly_slow

DECODE, PREFILL = StepShape(sequences=64, cached=4095, new=1), StepShape(sequences=1, cached=0, new=4096)
KIB = 1024


#: Layers; weights of a layer's attention; of all dense MLPs and routers; experts: (weights of one, how many, chosen, layers of them);
#: entries of all norms, hidden size, vocabulary; entries of all query heads; bytes of cache for a token and layer.
REAL = {
    "llama-3-8b": (32, 4096 * 10240, 32 * 3 * 4096 * 14336, None, 65 * 4096, 4096, 128256, 4096, 4 * KIB),
    "llama-3-70b": (80, 8192 * 18432, 80 * 3 * 8192 * 28672, None, 161 * 8192, 8192, 128256, 8192, 4 * KIB),
    "mixtral-8x7b": (32, 4096 * 10240, 32 * 4096 * 8, (3 * 4096 * 14336, 8, 2, 32), 65 * 4096, 4096, 32000, 4096, 4 * KIB),
}


def costs_of(name, *, tp, ep):
    bf16 = QUANTIZATIONS["bf16"]
    settings = dict(calibration=SPEC_SHEET, engine=load_engine("vllm"), quantization=bf16, cache=Dtype.BF16)
    return ServingEstimator(model=load_model(name), cluster=load_cluster("dgx-h100"), **settings).times([ServingLayout(tp=tp, ep=ep)])


def assert_predicted(name, counts, shape, *, tp=1, ep=1):
    """Assert that `perfmodel serve` predicts the counts of a decode step on one chip: FLOP, weights, cache and collectives."""
    model, bf16, costs = load_model(name), QUANTIZATIONS["bf16"], costs_of(name, tp=tp, ep=ep)
    program, seen = costs.decode_program, shape.cached + 1
    rows = operator_rows(costs, phase="decode", sequences=shape.sequences, cached=seen)
    assert sum(row.flops for row in rows) == pytest.approx(counts.flops, rel=1e-12)
    assert weight_bytes(program, bf16, tp=tp, pp=1, expert_cut=tp) == pytest.approx(counts.held_bytes, rel=1e-12)
    of_sequence = cache_shape(model).tokens_bytes(seen, tp=tp, kv_heads=model.num_key_value_heads, cache_bytes=2.0)
    assert shape.sequences * of_sequence == counts.cache_bytes
    traffic = program.rows.traffic
    between = sum(
        program.regions[region].count
        for region, group, kind in zip(traffic.segments, traffic.columns["group"], traffic.columns["kind"], strict=True)
        if kind == COLLECTIVE_CODE[CollectiveKind.ALL_REDUCE] and any(axis.startswith("tp") for axis in program.rows.amounts.masks[group])
    )
    of_experts = sum(program.regions[experts.segment].count for experts in program.rows.experts)
    assert sum(record.count for record in counts.collectives if record.kind == "all_reduce") == (between + of_experts if tp > 1 else 0)


def assert_counted(name, counts, shape, *, tp):
    layers, attention, dense, experts, norms, hidden, vocabulary, width, kept = REAL[name]
    rows, seen = shape.rows, shape.cached + shape.new
    one, number, chosen, of_layers = experts or (0, 0, 0, 0)
    met = min(number, rows * chosen)
    # the router, which no rank of tp shares
    router = 32 * 4096 * 8 if name == "mixtral-8x7b" else 0
    cut = layers * attention + (dense - router)
    products = 2 * rows * (cut / tp + router + of_layers * chosen * one / tp) + 2 * shape.sequences * hidden * vocabulary / tp
    assert counts.flops == products + 4 * layers * rows * seen * width / tp
    # of the table one row for each token: where tp cuts it, each rank looks up every row
    weights = cut / tp + router + of_layers * met * one / tp + hidden * vocabulary / tp + norms + rows * hidden
    assert counts.parameter_bytes == 2 * weights
    assert counts.cache_bytes == layers * kept / tp * shape.sequences * seen
    assert counts.written_bytes == layers * kept / tp * rows
    assert counts.held_cache_bytes == layers * kept / tp * shape.sequences * 4096
    assert counts.held_bytes == 2 * (cut / tp + router + of_layers * number * one / tp + 2 * hidden * vocabulary / tp + norms)
    if tp == 1:
        assert not counts.collectives
        return
    sent = {record.kind: (record.count, record.num_bytes) for record in counts.collectives}
    # after the table, the attention and the MLP of each layer; logits are gathered
    assert sent["all_reduce"] == (2 * layers + 1, (2 * layers + 1) * 2 * rows * hidden)
    assert sent["all_gather"] == (1, 2 * shape.sequences * vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, tp",
    mostly_nightly(
        [("llama-3-8b", 1), ("llama-3-70b", 4), ("mixtral-8x7b", 1), ("mixtral-8x7b", 2)], [("llama-3-8b", 1), ("mixtral-8x7b", 2)]
    ),
)
def test_real_models(name, tp, counting):
    for shape, counts in zip((DECODE, PREFILL), audit_serving(load_model(name), (DECODE, PREFILL), tp=tp, process=counting), strict=True):
        assert_counted(name, counts, shape, tp=tp)
        if shape.is_decode:
            assert_predicted(name, counts, shape, tp=tp)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", mostly_nightly([1, 8], [8]))
def test_deepseek_v3_attends_to_latents(ranks, counting):
    """Absorbed: queries of 128 heads meet latents of 512 + 64, which no rank of tp shares; 256 experts of 2048, 8 of them a token."""
    (counts,) = audit_serving(load_model("deepseek-v3"), [DECODE], tp=ranks, ep=ranks, process=counting)
    heads, unsharded = 128 // ranks, 7168 * (1536 + 576)
    # the latents of queries and keys are made on every rank; queries, what is absorbed of keys and values, and o of its own heads
    of_heads = heads * (1536 * 192 + 512 * 256 + 128 * 7168)
    mlps = (3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048) // ranks
    router, expert = 58 * 7168 * 256, 3 * 7168 * 2048
    head, norms = 7168 * 129280 // ranks, 61 * (2 * 7168 + 1536 + 512) + 7168
    products = 61 * (unsharded + of_heads) + mlps + router + head
    assert_predicted("deepseek-v3", counts, DECODE, tp=ranks, ep=ranks)
    assert counts.flops == 2 * 64 * (products + 58 * 8 * expert // ranks) + 61 * 64 * heads * 2 * 4096 * (576 + 512)
    assert counts.parameter_bytes == 2 * (products + 58 * 256 * expert // ranks + norms + 64 * 7168)
    assert counts.cache_bytes == 61 * 2 * 576 * 64 * 4096
    assert {record.kind: record.count for record in counts.collectives} == (
        {} if ranks == 1 else {"all_reduce": 2 * 61 + 1, "all_gather": 1}
    )


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 8])
def test_deepseek_v3_2_reads_the_latents_that_it_chose(ranks, counting):
    """As DeepSeek-V3; 64 small heads of 128, which no rank of tp shares, score all 4,096 keys, and 2,048 latents are attended to."""
    (counts,) = audit_serving(load_model("deepseek-v3.2"), [DECODE], tp=ranks, ep=ranks, process=counting)
    (dense,) = audit_serving(load_model("deepseek-v3"), [DECODE], tp=ranks, ep=ranks, process=counting)
    indexer, scores = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64, 2 * 4096 * 64 * 128
    fewer = 128 // ranks * 2 * (4096 - 2048) * (576 + 512)
    assert counts.flops - dense.flops == 61 * 64 * (2 * indexer + scores - fewer)
    assert counts.parameter_bytes - dense.parameter_bytes == 61 * 2 * (indexer + 2 * 128)
    assert counts.held_bytes - dense.held_bytes == 61 * 2 * (indexer + 2 * 128)
    assert counts.cache_bytes == 61 * 64 * 2 * (576 * 2048 + 128 * 4096)
    assert counts.written_bytes == 61 * 64 * 2 * (576 + 128)
    # what `perfmodel serve` predicts of it: scores are counted apart (`_indexing`)
    bf16, costs = QUANTIZATIONS["bf16"], costs_of("deepseek-v3.2", tp=ranks, ep=ranks)
    rows = operator_rows(costs, phase="decode", sequences=64, cached=4096)
    assert sum(row.flops for row in rows) + 61 * 64 * scores == pytest.approx(counts.flops, rel=1e-12)
    assert weight_bytes(costs.decode_program, bf16, tp=ranks, pp=1, expert_cut=ranks) == pytest.approx(counts.held_bytes, rel=1e-12)


@pytest.mark.slow
def test_gpt_oss_reads_no_more_than_its_windows(counting):
    """36 layers, every second of which sees 128 keys: 64 heads and 8 key-value heads of 64."""
    (counts,) = audit_serving(load_model("gpt-oss-120b"), [DECODE], process=counting)
    assert_predicted("gpt-oss-120b", counts, DECODE)
    seen = 18 * 4096 + 18 * 128
    assert counts.cache_bytes == 64 * seen * 2 * 8 * 64 * 2
    assert counts.held_cache_bytes == 64 * 36 * 4096 * 2 * 8 * 64 * 2
    products = 36 * (2880 * (2 * 4096 + 2 * 512) + 2880 * 128 + 4 * 3 * 2880 * 2880) + 2880 * 201088
    assert counts.flops == 64 * (2 * products + 4 * seen * 4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, tp",
    mostly_nightly(
        [("nemotron-h-8b", 1), ("nemotron-h-8b", 2), ("qwen3-next-80b-a3b", 1), ("qwen3-next-80b-a3b", 2)],
        [("nemotron-h-8b", 2)],
    ),
)
def test_states_of_real_models(name, tp, counting):
    """A decode step of 256 sequences, a prompt of 4,096 tokens, and the second half of one of 8,192: all that `serve` counts, but that
    torch's formula counts keys which a token of a prompt does not see; experts are all met."""
    model, bf16 = load_model(name), QUANTIZATIONS["bf16"]
    ep = tp if model.parts.experts else 1
    decode, chunk = StepShape(sequences=256, cached=4095, new=1), StepShape(sequences=1, cached=4096, new=4096)
    costs = costs_of(name, tp=tp, ep=ep)
    attention = next(kind for kind in model.layer_kinds if kind.mixer == "attention")
    held = weight_bytes(costs.decode_program, bf16, tp=tp, pp=1, expert_cut=tp)
    table = 2 * model.vocab_size * model.hidden_size // tp
    shapes = (decode, PREFILL, chunk)
    for shape, counts in zip(shapes, audit_serving(model, shapes, tp=tp, ep=ep, process=counting), strict=True):
        kept = cache_shape(model).tokens_bytes(shape.cached + shape.new, tp=tp, kv_heads=model.num_key_value_heads, cache_bytes=2.0)
        assert counts.cache_bytes == counts.held_cache_bytes == shape.sequences * kept
        entries = 2 * 2 * attention.count * model.num_key_value_heads * model.head_dim // tp
        assert counts.written_bytes == shape.rows * entries + shape.sequences * cache_shape(model).state / tp
        assert counts.held_bytes == held
        assert counts.parameter_bytes == held - table + 2 * shape.rows * model.hidden_size
        if shape.is_decode:
            assert_predicted(name, counts, shape, tp=tp, ep=ep)
            continue
        rows = operator_rows(costs, phase="prefill", tokens=shape.new, cached=shape.cached)
        attention_flops = 4 * attention.count * shape.new * (shape.cached + shape.new) * model.num_attention_heads * model.head_dim // tp
        other_flops = sum(row.flops for row in rows if row.name != "attention_layer.attention")
        assert other_flops + attention_flops == pytest.approx(counts.flops, rel=1e-12)


FORMS = [
    ("llama", 1), ("hybrid", 1), ("hybrid", 2), ("llama", 2), ("qwen3-next", 2), ("mixtral", 2), ("deepseek", 2), ("sparse", 1),
    ("sparse", 2),
]  # fmt: skip


@pytest.mark.parametrize("form", mostly_slow(FORMS, quick=2))
@pytest.mark.slow
def test_fake_tensors_count_what_real_ones_do(form, groups, counting):
    """But for experts, which are chosen in turn: of 8 rows for 8 experts each has one."""
    from perfmodel.execute.serving.run import run_serving

    (variant, tp), shape = form, StepShape(sequences=4, cached=40, new=1)
    (measured,) = run_serving(tiny(variant), [shape], tp=tp, group=groups(tp), rounds=1, repeats=1, checks=False).steps
    (audited,) = audit_serving(tiny(variant), [shape], tp=tp, dtype=Dtype.FP32, process=counting)
    same = ["flops", "cache_bytes", "written_bytes", "collectives", "held_bytes", "held_cache_bytes"]
    same += ["parameter_bytes"] if variant in ("llama", "hybrid") else []
    assert {name: getattr(measured.counts, name) for name in same} == {name: getattr(audited, name) for name in same}


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(InputError, match="not evenly many for 8 experts"):
        audit_serving(tiny("mixtral"), [StepShape(sequences=5, cached=0, new=1)])
    with pytest.raises(InputError, match="has attention in chunks"):
        audit_serving(load_model("llama-4-scout"), [DECODE])
    with pytest.raises(InputError, match="tp=16: must divide linear_num_key_heads"):
        audit_serving(tiny("qwen3-next", num_attention_heads=16, num_key_value_heads=16), [DECODE], tp=16)
    with pytest.raises(InputError, match="ep=3: must divide"):
        audit_serving(tiny("mixtral"), [DECODE], tp=4, ep=3)
