"""Rows of a compiled program in each phase, and the tensors that autograd keeps."""

import numpy as np
import pytest

from perfmodel.cost.program import PHASES, SAVED, segment
from perfmodel.parallel.algebra.sharding import COMM, comm_class
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model
from tests.marks import mostly_nightly

FLASH, UNFUSED = AttentionKernel


def program_of(*, profile="megatron", rule_set="megatron-sp", attention=UNFUSED, recompute=DEFAULT_RECOMPUTE_OPERATORS, **model):
    return estimator_of(make_job(make_model(**model)), profile=profile).programs.program(rule_set, attention, recompute)


REGIONS = ("embedding", "layer", "head")


def names(rows, region, phase=None):
    """Names of the rows of a region (and phase)."""
    wanted = [segment(REGIONS.index(region), p) for p in ([phase] if phase else PHASES)]
    return [name for name, s in zip(rows.names, rows.segments.tolist(), strict=True) if s in wanted]


def saved(program, region, kind):
    wanted = REGIONS.index(region) * len(SAVED) + SAVED.index(kind)
    return [name for name, s in zip(program.saved.names, program.saved.segments.tolist(), strict=True) if s == wanted]


def traffic(program, region, phase, kind):
    wanted = segment(REGIONS.index(region), phase) * len(COMM) + COMM.index(kind)
    return [name for name, s in zip(program.rows.traffic.names, program.rows.traffic.segments.tolist(), strict=True) if s == wanted]


def test_every_matrix_product_has_two_backward():
    program = program_of(attention=UNFUSED)
    forward = [name for name in program.rows.matmul.names if "." not in name]
    backward = [name for name in program.rows.matmul.names if "." in name]
    assert sorted(backward) == sorted(f"{name}.grad{i}" for name in forward for i in (0, 1))
    assert names(program.rows.matmul, "layer", "core") == ["scores", "context"]


def test_fused_attention_is_one_row_each_way():
    program = program_of(attention=FLASH)
    assert names(program.rows.attention, "layer", "core") == ["attention"]
    assert names(program.rows.attention, "layer", "backward") == ["attention.grad"]
    assert not names(program.rows.matmul, "layer", "core")


def test_rows_are_sorted_by_segment_for_reduceat():
    program = program_of()
    for rows in (program.rows.matmul, program.rows.streaming, program.rows.traffic, program.saved):
        assert (np.diff(rows.segments) >= 0).all()
        assert rows.segments[rows.starts].tolist() == rows.present.tolist() == np.unique(rows.segments).tolist()


def test_the_tail_begins_where_the_last_tensor_is_saved():
    """torch stops recomputing there: the last projection itself, its reduction and what follows do not run again."""
    program = program_of(profile="torch-fsdp2", dropout=0.0)
    assert names(program.rows.matmul, "layer", "tail") == ["down_proj"]
    assert names(program.rows.streaming, "layer", "tail")[-1] == "mlp_add"
    assert traffic(program, "layer", "tail", "tensor_parallel") == ["down_proj.out"]
    assert "mlp_norm.out" in traffic(program, "layer", "rest", "tensor_parallel")


@pytest.mark.parametrize(
    "profile, attention, again",
    [
        ("megatron", UNFUSED, ["scores", "context"]),
        ("torch-fsdp2", UNFUSED, ["scores"]),
        ("torch-fsdp2", FLASH, []),
    ],
)
def test_a_recomputation_that_stops_early_leaves_out_the_last_product_of_the_core(profile, attention, again):
    """It reads what backward needs, and its output is kept outside the core; the fused kernel's output is not."""
    program = program_of(profile=profile, attention=attention)
    assert names(program.rows.matmul, "layer", "core") == again
    assert names(program.rows.attention, "layer", "core") == (["attention"] if attention is FLASH else [])


def test_the_bias_of_a_row_parallel_linear_is_partial_over_tp_in_megatron_and_whole_in_torch():
    def summed(profile):
        parameters = program_of(profile=profile).parameters
        return {parameter.name for parameter in parameters if "tp_kv" in parameter.gradient_axes and parameter.name.endswith("proj.bias")}

    assert summed("megatron") == {"o_proj.bias", "down_proj.bias"}
    assert summed("torch-fsdp2") == set()


def test_selective_recomputation_drops_the_square_and_nothing_else():
    program = program_of(attention=UNFUSED)
    assert sorted(saved(program, "layer", "dropped_by_selective")) == [
        "attention_weights_dropout",
        "attention_weights_dropout.out",
        "softmax.out",
    ]
    assert saved(program, "layer", "boundary") == ["block_input.out"]


@pytest.mark.parametrize("operators", [("activation",), ("attention_core", "activation"), ()])
def test_selective_recomputation_of_other_operators(operators):
    program = program_of(attention=UNFUSED, recompute=operators)
    core = names(program.rows.matmul, "layer", "core") + names(program.rows.streaming, "layer", "core")
    assert ("scores" in core) == ("attention_core" in operators)
    assert ("activation" in core) == ("activation" in operators)


def test_a_tensor_is_saved_once_for_all_its_readers():
    program = program_of(**LLAMA_LIKE)
    kept = saved(program, "layer", "kept")
    assert kept.count("attention_norm.out") == 1  # q, k and v
    assert kept.count("mlp_norm.out") == 1  # gate and up


def test_biases_ride_on_the_matrix_product_where_nothing_is_between():
    """A bias after a reduction is a kernel of its own; with tensor parallelism the output projections' are."""
    alone = program_of()
    forward = names(alone.rows.streaming, "layer", "rest") + names(alone.rows.streaming, "layer", "tail")
    assert "o_proj_bias" in forward
    assert "down_proj_bias" in forward
    assert not {"q_proj_bias", "up_proj_bias"} & set(forward)


def test_megatron_gathers_saved_inputs_again_and_torch_keeps_them():
    for profile, regathered in (("megatron", ["attention_norm.out", "mlp_norm.out"]), ("torch-fsdp2", [])):
        program = program_of(profile=profile, attention=FLASH)
        sent_again = [name for name in traffic(program, "layer", "backward", "regather") if name.endswith("norm.out")]
        assert sent_again == regathered, profile


def test_megatron_keeps_the_shards_of_keys_and_values_and_torch_what_was_gathered():
    """Attention reads all keys and values of a sequence that cp shards; a shard of each is kept where they are gathered again."""
    for profile, again in (("megatron", ["k_rotary.out", "v_proj.out"]), ("torch-fsdp2", [])):
        program = program_of(profile=profile, rule_set="megatron", attention=FLASH, **LLAMA_LIKE)
        sent = [name for name in traffic(program, "layer", "backward", "context_parallel") if name in ("k_rotary.out", "v_proj.out")]
        assert sorted(name for name in set(sent) if sent.count(name) == 2) == again, profile
        kept = dict(zip(program.saved.names, program.saved.columns["amount"], strict=True))
        axes = [program.rows.amounts.masks[program.rows.amounts.axes[kept[name]]] for name in ("k_rotary.out", "v_proj.out")]
        assert all(("cp" in cut) == bool(again) for cut in axes), profile


def test_classes_of_communication():
    assert comm_class(frozenset(("tp_q",))) == "tensor_parallel"
    assert comm_class(frozenset(("cp",))) == "context_parallel"
    assert comm_class(frozenset(("cp", "tp_kv"))) == "tensor_parallel"


@pytest.mark.slow
@pytest.mark.parametrize("every", mostly_nightly([1, 4], [4]))
def test_both_rule_sets_compile_for_every_shipped_model(every):
    from perfmodel.workload.models import list_models, load_model

    for name in list_models()[::every]:
        model = load_model(name)
        estimator = estimator_of(make_job(model, seq_len=min(256, model.positions.max_position_embeddings)))
        for rule_set in ("megatron", "megatron-sp"):
            program = estimator.programs.program(rule_set, FLASH, DEFAULT_RECOMPUTE_OPERATORS)
            assert set(program.rows.attention.columns["head_dim"]) == {model.head_dim}
            assert len(program.rows.streaming.access_starts) == len(program.rows.streaming.names)


def test_a_program_is_compiled_once():
    estimator = estimator_of()
    first = estimator.programs.program("megatron", FLASH, DEFAULT_RECOMPUTE_OPERATORS)
    assert estimator.programs.program("megatron", FLASH, DEFAULT_RECOMPUTE_OPERATORS) is first
    assert estimator.programs.program("megatron", UNFUSED, DEFAULT_RECOMPUTE_OPERATORS) is not first
