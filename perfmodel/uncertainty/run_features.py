"""Features of a plan by which prediction errors differ, in the form in which residuals store them.

Mixture of experts is not a rare feature: its published runs have an interval of their own (`residuals.with_experts`).
"""

from __future__ import annotations

from perfmodel.foundation.dtypes import itemsize
from perfmodel.parallel.plan import Plan
from perfmodel.uncertainty.residuals import RunFeatures, scale_of

ADAPTERS, LONG, WINDOWS = "adapters", "long sequences", "sliding windows"

LONG_SEQUENCE = 32_768
"""[tokens] Beyond it attention is most of a step, and kernels and load balance differ from those of shorter sequences."""

#: Mixers other than attention.
_MIXERS = {"mamba": "state-space layers", "delta": "delta networks", "latent": "latent attention", "none": "layers without a mixer"}


def features_of(plan: Plan, chip: str) -> RunFeatures:
    """Return the features of a plan of a language model on `chip`."""
    job = plan.job
    recipe = job.policy.recipe
    rare = {_MIXERS[kind.mixer] for kind in job.transformer.layer_kinds if kind.mixer in _MIXERS}
    if job.transformer.sliding_layer_fraction > 0:
        rare.add(WINDOWS)
    if not job.train.is_full:
        rare.add(ADAPTERS)
    if job.seq_len > LONG_SEQUENCE:
        rare.add(LONG)
    bits = 16 if recipe is None else round(8 * itemsize(recipe.product))
    return RunFeatures(chip=chip, scale=scale_of(plan.num_chips), bits=bits, rare=frozenset(rare))
