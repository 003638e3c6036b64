"""Live tensors of a backward pass, for both treatments of weight gradients."""

import numpy as np

from tests.cost.jobs import make_model
from tests.cost.memory.test_forward_walk import activations


def test_weight_gradients_that_stay_add_at_most_those_of_the_layer():
    """The largest moment may come before all of them are there."""
    wide = make_model(intermediate_size=64 * 512)
    parameters = sum(int(np.prod(shape.shape)) for shape in wide.layer_shapes())
    at_once, kept = activations(model=wide, recompute="none").peaks[1]
    assert at_once < kept <= at_once + 2 * parameters
