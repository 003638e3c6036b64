"""How published runs say that they fine-tune, read and refused."""

import math

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.validation.case_plan import plan_of_case
from perfmodel.validation.cases import parse_case
from perfmodel.validation.fine_tuning import stated_optimizer, stated_training, states_training, trains_adapters
from perfmodel.workload.job import Optimizer, Precision

RUN = {
    "framework": "some trainer",
    "model": {"name": "Llama-2-7B", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    | {"gated_mlp": True, "vocab_size": 32000, "tie_word_embeddings": False},
    "sequence_length": 2048,
    "chip": "a100-sxm-80gb",
    "num_chips": 1,
    "global_batch": 8,
    "micro_batch": 2,
    "precision": "bf16",
    "recompute": "full",
}


@pytest.mark.parametrize(
    "stated, means",
    [
        ({"method": "full"}, "full"),
        ({"method": "sft full"}, "full"),
        ({"method": "lora", "lora": {"r": 8, "targets": "query, value"}}, "lora:8:q_proj+v_proj"),
        ({"method": "rl lora", "lora": {"r": 16, "adapters": 4, "targets": "all linears"}}, "lora:16x4"),
        ({"method": "qlora", "lora": {"rank": 64, "targets": "all linears"}}, "qlora:64"),
        ({"method": "qlora", "lora": {"r": 8}, "settings": {"base_weights": "4-bit nf4"}}, "qlora:8:all-linear:nf4"),
        ({"method": "qlora", "lora": {"r": 8}, "settings": {"base_weights": "gptq int8"}}, "qlora:8:all-linear:int8"),
        ({"method": "lora", "lora": {"rank": 32, "targets": "attention + experts", "base_bits": 8}}, "qlora:32:experts+attention:int8"),
        ({"method": "dora", "lora": {"rank": 64, "targets": "all linears"}}, "dora:64"),
        ({"method": "qdora", "lora": {"r": 8}}, "qdora:8"),
        (
            {"method": "lora", "lora": {"rank": 8, "targets": "attention q,v,o + mlp", "base_bits": 16}},
            "lora:8:q_proj+v_proj+o_proj+gate_proj+up_proj+down_proj",
        ),
    ],
)
def test_the_method_the_adapters_and_the_base_of_a_run_are_read(stated, means):
    assert str(stated_training(stated)) == means
    assert trains_adapters(stated) == (means != "full")


@pytest.mark.parametrize(
    "stated", [{"method": "dpo full"}, {"method": "grpo full"}, {"method": "lokr"}, {"method": "lora", "modality": "video"}]
)
def test_what_cannot_be_predicted_has_a_reason(stated):
    with pytest.raises(InputError):
        stated_training(stated)


@pytest.mark.parametrize(
    "text, optimizer",
    [
        ("adamw", Optimizer.ADAMW),
        ("8-bit adamw", Optimizer.ADAMW_8BIT),
        ("paged 8-bit adamw (bitsandbytes)", Optimizer.PAGED_ADAMW_8BIT),
        ("4-bit adamw", Optimizer.ADAMW_4BIT),
        ("muon", Optimizer.MUON),
    ],
)
def test_optimizers_are_known_by_the_names_that_sources_give_them(text, optimizer):
    assert stated_optimizer({"optimizer": text}) is optimizer


def test_a_quantised_base_is_not_predicted_as_full_training():
    """Before, runs were read as adapters only where their names contained lora: qlora rows were predicted two to nine times too large."""
    full, lora, qlora = (
        plan_of_case(RUN | {"method": method, "lora": {"r": 8, "targets": "all linears"} if "lora" in method else None})
        for method in ("full", "lora", "qlora")
    )
    assert [str(run.plan.job.train) for run in (full, lora, qlora)] == ["full", "lora:8", "qlora:8"]
    assert plan_of_case(RUN | {"method": "full", "settings": {"pure_bf16": True}}).plan.job.precision is Precision.BF16


def test_a_time_over_sequences_shorter_than_the_cut_is_no_time_of_the_stated_length():
    line = '{"id": "a", "packed": %s, "global_batch": 8, "measured": {"step_time_s": 2.0, "peak_memory_gib": 10}}'
    full, cut = (parse_case(line % packed, 1) for packed in ("true", "false"))
    assert full.measured("step_time") == 2.0
    assert math.isnan(cut.measured("step_time"))
    assert full.measured("memory") == cut.measured("memory") == 10 * 2**30


def test_head_dims_and_windows_of_a_runs_model_are_read():
    model = RUN["model"] | {"name": "OLMo-3-7B", "sliding_window": 4096, "sliding_layers": "3 of 4", "num_key_value_heads": 32}
    transformer = plan_of_case(RUN | {"model": model}).plan.job.transformer
    assert (transformer.attention.sliding_window, transformer.attention.full_attention_every) == (4096, 4)
    named = {"name": "Qwen3-0.6B", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    transformer = plan_of_case(
        RUN | {"model": named | {"head_dim": 128, "intermediate_size": 3072, "gated_mlp": True}}
    ).plan.job.transformer
    assert (transformer.head_dim, transformer.norms.qk_norm) == (128, True)


def test_a_run_that_describes_its_adapters_trains_them_whether_it_names_the_method_or_not():
    """Unsloth's README: the longest sequence of a quantised 8B model on 80 GB; read as full training it took 213 GiB."""
    inputs = {"lora": {"rank": 32, "targets": "all-linear", "base_bits": 4}}
    assert states_training(inputs)
    assert trains_adapters(inputs)
    assert str(stated_training(inputs).method) == "qlora"
