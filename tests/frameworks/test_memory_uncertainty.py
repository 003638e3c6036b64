"""The uncertainty of the memory under a profile."""

from dataclasses import replace

from perfmodel.frameworks.fitted import FittedTo
from perfmodel.frameworks.profile import (
    KNOWN,
    UNKNOWN,
    load_profile,
    shipped_memory_uncertainties,
    uncertainty_of_memory,
)


def test_a_framework_is_known_or_not_whatever_it_was_fitted_to():
    uncertainties = shipped_memory_uncertainties()
    assert uncertainty_of_memory(load_profile("megatron")) == uncertainties[KNOWN]
    assert uncertainty_of_memory(load_profile("generic+compile")) == uncertainties[UNKNOWN]
    profile = replace(load_profile("generic"), name="mine", fitted=FittedTo(base="generic", num_runs=3))
    assert uncertainty_of_memory(profile) == uncertainties[UNKNOWN]
    assert uncertainties[UNKNOWN].of_unseen
    assert not uncertainties[KNOWN].of_unseen
