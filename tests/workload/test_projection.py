"""Gradients of low rank (GaLore, arXiv 2403.03507)."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import load_model
from perfmodel.workload.projection import SUBSPACE_STEPS, projection_of
from perfmodel.workload.training import Training, training_of

LLAMA = load_model("llama-2-7b")
ATTENTION, MLP = 32 * 4, 32 * 3  # matrices of 4096 x 4096, and of 4096 x 11008


def test_states_and_matrices_are_those_of_table_1():
    """m r of projection and n r of each state, m <= n; embeddings, the head and norms are as they were."""
    projection, rank = projection_of(LLAMA, training_of("galore:1024")), 1024
    others = LLAMA.num_parameters - ATTENTION * 4096 * 4096 - MLP * 4096 * 11008
    assert projection.state * LLAMA.num_parameters == pytest.approx(others + rank * (ATTENTION * 4096 + MLP * 11008))
    assert projection.matrix * LLAMA.num_parameters == pytest.approx(rank * 4096 * (ATTENTION + MLP))
    assert projection.flops * LLAMA.num_parameters == pytest.approx(4 * rank * (LLAMA.num_parameters - others))


def test_the_subspace_of_llama_7b_takes_the_ten_minutes_that_were_published():
    projection = projection_of(LLAMA, training_of("galore:128"))
    assert projection.time * LLAMA.num_parameters * SUBSPACE_STEPS == pytest.approx(600)


def test_a_rank_is_no_more_than_a_matrix_has_and_targets_are_held_to():
    full, some = (projection_of(LLAMA, training_of(f"galore:{text}")) for text in ("60000", "16:attention"))
    assert full.state == 1.0
    assert some.matrix * LLAMA.num_parameters == pytest.approx(16 * 4096 * ATTENTION)


def test_all_weights_are_trained_and_the_text_is_kept():
    how = training_of("galore:128:q_proj+v_proj")
    assert how.is_full
    assert str(how) == "galore:128:q_proj+v_proj"
    assert isinstance(how, Training)


@pytest.mark.parametrize("text", ["galore", "galore:0", "galore:16x4", "galore:16:all-linear:int8"])
def test_faults_of_such_texts_are_named(text):
    with pytest.raises(InputError, match="train"):
        training_of(text)
