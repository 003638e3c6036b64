"""Live tensors of a forward and a backward pass, counted by hand. A recomputed pass has the gradient of its backward in addition."""

import numpy as np
import pytest

from perfmodel.cost.estimate import evaluate_plan
from perfmodel.cost.memory.live import Terms
from perfmodel.parallel.algebra.derive import Amount
from perfmodel.parallel.plan import make_plan
from tests.cost.jobs import estimator_of, make_job, make_model
from tests.laws.volumes import derivation_of

S, H, F = 256, 512, 2048


def activations(profile="torch-fsdp2", *, seq_len=S, model=None, **knobs):
    estimator = estimator_of(make_job(model or make_model(), seq_len=seq_len), chips=1, profile=profile)
    plan = make_plan(estimator.job, cluster=estimator.cluster.name, num_chips=1, **knobs)
    return evaluate_plan(estimator, plan).memory_row.of.activations


def test_of_a_layer_of_which_nothing_is_kept_the_wide_tensors_live_together():
    """Before and behind the activation function, and the residual stream."""
    assert activations(recompute="full").forward[1] == 2 * S * (2 * F + H)


def test_scores_and_their_probabilities_live_while_the_rest_of_a_layer_is_not_there_yet():
    thin = make_model(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, intermediate_size=32)
    scores, rest = 2 * 4 * 1024**2, 2 * 1024 * 32
    assert scores - 8 * rest < activations(seq_len=1024, model=thin, attention="unfused").forward[1] < scores + 2 * rest


@pytest.mark.parametrize("profile", ["megatron", "torch-fsdp2"])
def test_a_recomputed_layer_has_the_gradient_of_its_output_next_to_it(profile):
    wide = make_model(intermediate_size=64 * H)
    none, full = (activations(profile, model=wide, recompute=recompute) for recompute in ("none", "full"))
    again = none.kept[1] - full.kept[1] + full.boundary + none.forward[1]
    assert all(peak >= again - 2 * S * H for peak in full.peaks[1])


def test_amounts_of_one_form_are_one_term():
    """So a moment of more and larger tensors is larger, whatever they are."""
    row, wide, other = Amount(base=2.0, batch_dim="b"), Amount(base=6.0, batch_dim="b"), Amount(base=1.0)
    terms = Terms(derivation_of("gpt2", "ddp"))
    moments = [{terms.number(row): 2.0}, {terms.number(wide): 1.0}, {terms.number(other): 1.0}]
    assert terms.undominated(moments) == [{terms.number(Amount(base=1.0, batch_dim="b")): 6.0}, {terms.number(other): 1.0}]


def test_weight_gradients_that_stay_add_at_most_those_of_the_layer():
    """The largest moment may come before all of them are there."""
    wide = make_model(intermediate_size=64 * 512)
    parameters = sum(int(np.prod(shape.shape)) for shape in wide.layer_shapes())
    at_once, kept = activations(model=wide, recompute="none").peaks[1]
    assert at_once < kept <= at_once + 2 * parameters
