"""The uncertainty of the memory under a profile."""

from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.fitted import FittedTo
from perfmodel.frameworks.profile import (
    KNOWN,
    UNKNOWN,
    load_profile,
    read_memory_uncertainties,
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


@pytest.mark.parametrize("text", ["known: {centre: 0, scale: 1}", "{}", "known: {centre: no, scale: 1, rests_on: x}"])
def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "doubts.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"memory_uncertainty=.*cannot be read"):
        read_memory_uncertainties(path)
