"""Steps of GPT-2 on 12 V100 and 4 T4, and on 16 T4, against Li et al. (AMP, NeurIPS 2022; github DachengLi1/AMP @72eeea4, src/results).

The inputs are those of the source: nodes of four chips with one NIC of 10 or 50 Gbit/s, 50 Gbit/s between two T4 of a node
(het_cluster.py), DeepSpeed 0.3.13 without ZeRO and recomputation, fp32_allreduce (ds_config.json), NCCL without trees (.deepspeed_env),
blocking sends with the attention mask, whole gradients of each tensor-parallel rank (runtime/pipe/engine.py), and the printed stages. A T4
of these nodes sustains 900 of its 1,590 MHz (mlcommons/inference_results_v0.5, issue 20). No measured step is an input.

The tolerances are of means. Eight plans with tensor parallelism, a pipeline and micro-batches of one or two sequences took up to 2.4 times
the predicted time on mixed nodes, not on T4 alone; the source does not state why. Without them the error is 6 %. Each took 40 to 120 ms a
micro-batch longer, with 3 to 12 layers a stage and 2 or 4 tensor-parallel ranks alike: neither layers nor tensor-parallel sums explain it.
Only with tensor parallelism and a pipeline, DeepSpeed gathers the parts of an activation on each stage (PartitionedTensor.full).
"""

import csv
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from perfmodel.validation.cases import Case
from perfmodel.validation.validate import CasePredictor

ROWS = list(csv.DictReader(Path(__file__).with_name("published_mixed_chips.csv").read_text(encoding="utf-8").splitlines()))

MODEL = {
    "name": "GPT-2 24x1024",
    "kind": "decoder",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
    "gated_mlp": False,
    "vocab_size": 52256,
    "tie_word_embeddings": True,
    "num_experts": None,
    "num_experts_per_tok": None,
}

V100 = {"chip": "v100-sxm2-16gb", "count": 12, "nodes": 3, "network_gbit_s": 10, "nics": 1}
T4 = {"chip": "t4-16gb", "count": 4, "nodes": 1, "network_gbit_s": 50, "scale_up_gbit_s": 50, "nics": 1, "speed": 0.57}
KINDS = {"mixed": [V100, T4], "t4": [{**T4, "count": 8, "nodes": 2}] * 2}

SETTINGS = ("fp32_gradient_reduction", "nccl_rings", "blocking_sends", "whole_gradient_sends", "mask_sends")


def errors(cluster, *, kinds=None, settings=SETTINGS):
    """Predicted and measured seconds of each row."""
    predictor = CasePredictor()
    pairs = []
    for number, row in enumerate(row for row in ROWS if row["cluster"] == cluster):
        cuts = [int(cut) for cut in row["cut"].split()]
        run = {
            "framework": "DeepSpeed 3D parallelism (Megatron-LM 1.1.5)",
            "model": MODEL,
            "sequence_length": 1024,
            "chips": kinds or KINDS[cluster],
            "num_chips": 16,
            "precision": "fp16",
            "global_batch": 32,
            "flash_attention": False,
            "zero_stage": 0,
            "recompute": "none",
            "settings": dict.fromkeys(settings, True),
            "stages": [{"units": end - begin} for begin, end in pairwise(cuts)],
            **{name: int(row[name]) for name in ("tp", "dp", "pp", "micro_batch")},
        }
        predicted = predictor.row(Case(id=str(number), inputs=run, measurements={"step_time": float(row["seconds"])})).predicted_step_time
        pairs.append((predicted, float(row["seconds"])))
    return pairs


def mean_error(pairs):
    return sum(abs(predicted / measured - 1.0) for predicted, measured in pairs) / len(pairs)


def in_order(pairs, apart=0.0):
    """Share of the pairs of plans whose order is predicted, of those whose measured times differ by more than this share."""
    differing = [(a, b) for a, b in combinations(pairs, 2) if abs(a[1] - b[1]) > apart * min(a[1], b[1])]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in differing) / len(differing)


def is_unexplained(row):
    """Whether a plan is one of the eight of which each micro-batch took longer on mixed nodes."""
    return row["cluster"] == "mixed" and int(row["tp"]) > 1 and int(row["pp"]) > 1 and int(row["micro_batch"]) <= 2


@pytest.mark.parametrize(
    ("cluster", "number", "most", "least_in_order"),
    [("mixed", 43, 0.125, 0.75), pytest.param("t4", 47, 0.21, 0.86, marks=pytest.mark.slow)],
)
def test_published_steps(cluster, number, most, least_in_order):
    pairs = errors(cluster)
    assert len(pairs) == number
    assert mean_error(pairs) < most
    assert in_order(pairs) > least_in_order


def test_pairs_out_of_order_are_close_or_have_an_unexplained_plan():
    rows, pairs = [row for row in ROWS if row["cluster"] == "mixed"], errors("mixed")
    known = [pair for row, pair in zip(rows, pairs, strict=True) if not is_unexplained(row)]
    assert len(known) == 35
    assert mean_error(known) < 0.065
    assert [round(in_order(known, apart), 2) for apart in (0.0, 0.05, 0.1, 0.2)] == [0.91, 0.94, 0.96, 1.0]
    for row, (predicted, measured) in zip(rows, pairs, strict=True):
        if is_unexplained(row):
            num_microbatches = 32 / (int(row["dp"]) * int(row["micro_batch"]))
            assert 0.04 < (measured - predicted) / num_microbatches < 0.12


def test_what_the_source_states_counts():
    """Without it, the same plans are 45 % off, and little more than half of the pairs are in order."""
    bare = [{name: kind[name] for name in ("chip", "count", "nodes", "network_gbit_s")} for kind in KINDS["mixed"]]
    pairs = errors("mixed", kinds=bare, settings=())
    assert mean_error(pairs) > 0.4
    assert in_order(pairs) < 0.6
