"""Forms in which ranks share a sequence: causal balance, what travels and what hides, what a rank holds."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.prediction import Prediction

JOB = {"model": "qwen3-8b", "cluster": "dgx-h100", "chips": 8, "global_batch": 1, "seq_len": "1M", "cp": 8, "zero": 3, "recompute": "full"}
SETTINGS = {"attention_kernel": "cudnn", "loss": "chunked"}


def in_form(form: str | None, **changed: object) -> Prediction:
    more = {} if form is None else {"cp_form": form}
    return perfmodel.predict(**(JOB | changed), profile="torch-fsdp2", settings=SETTINGS, offload="checkpoints", **more)


def test_a_ring_in_order_waits_for_its_last_rank():
    """2 - 1/n of the mean work on the last of n ranks; all other forms are balanced."""
    ring, *balanced = (in_form(form).step_time for form in ("ring", "zigzag", "all-gather", "ulysses"))
    assert ring / balanced[0] == pytest.approx(2 - 1 / 8, rel=0.04)
    assert balanced == pytest.approx([balanced[0]] * 3, rel=0.01)


def test_keys_sent_around_a_ring_are_overlapped_by_products_and_never_all_resident():
    gathered, ring = in_form("all-gather"), in_form("zigzag")
    assert gathered.parts["context_parallel_communication"] > 1.0
    assert ring.parts["context_parallel_communication"] == 0.0
    keys_and_values = 2**20 * 8 * 128 * 2 * 2
    assert gathered.memory["total"] - ring.memory["total"] == pytest.approx(keys_and_values, rel=0.5)


def test_short_blocks_do_not_hide_what_travels():
    across_nodes = {"chips": 64, "cp": 64, "seq_len": "16k"}
    shown = [in_form(form, **across_nodes).parts["context_parallel_communication"] for form in ("zigzag", "all-gather")]
    assert 0.0 < shown[0] < shown[1]


def test_the_frameworks_own_form_is_gathered():
    assert in_form(None).step_time == in_form("all-gather").step_time


def test_ulysses_is_a_form_and_no_rule_set_to_guess():
    """LlamaFactory issue 5024 (a 7B model at 120k tokens on 8 H100), verl issue 901: users ask for Ulysses by its name."""
    prediction = in_form("ulysses")
    assert prediction.plan.rule_set == "ulysses"
    assert in_form("ulysses", cp=4, tp=2, zero=0).plan.rule_set == "megatron-ulysses"
    again = perfmodel.find_plans(**{**JOB, "cp": 4, "seq_len": "120k"}, profile="torch-fsdp2", cp_form="ulysses", top=1)
    assert again.plans[0].plan.rule_set in ("ulysses", "megatron-ulysses")
    assert not again.plans[0].not_runnable


def test_one_rank_knows_no_form():
    alone = {"cp": 1, "seq_len": "8k", "global_batch": 8}
    plain = in_form(None, **alone)
    for form in ("all-gather", "ring", "zigzag", "ulysses"):
        prediction = in_form(form, **alone)
        assert (prediction.step_time, prediction.memory["total"]) == (plain.step_time, plain.memory["total"]), form


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"cp_form": "usp"}, "not predicted; use ulysses up to the number of key-value heads, else zigzag"),
        ({"cp_form": "rings"}, "use one of all-gather, ring, zigzag, ulysses"),
        ({"offload": "checkpoint"}, "did you mean 'checkpoints'"),
        ({"cp_form": "ulysses", "cp": 16, "chips": 16}, "must divide num_key_value_heads=8"),
    ],
)
def test_what_is_not_known_is_refused_with_a_remedy(words, message):
    with pytest.raises(InputError) as error:
        perfmodel.predict(**(JOB | words), profile="torch-fsdp2")
    assert message in str(error.value)


def test_offload_is_a_word_for_settings():
    one = perfmodel.predict(**JOB, profile="torch-fsdp2", offload=["checkpoints", "optimizer"])
    other = perfmodel.predict(**JOB, profile="torch-fsdp2", settings={"checkpoint_offload": True, "optimizer_offload": True})
    assert one.plan == other.plan
    assert one.memory == other.memory
