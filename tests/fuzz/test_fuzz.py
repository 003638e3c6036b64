"""A small share of the random inputs in every run of the tests; `python -m tests.fuzz.run` tries any number of them."""

import pytest

from tests.fuzz.kinds import SHARES
from tests.fuzz.run import fuzz, kind_of, report


def test_every_kind_comes_up_by_its_share():
    kinds = [kind_of(number) for number in range(sum(SHARES.values()))]
    assert {kind: kinds.count(kind) for kind in SHARES} == SHARES
    assert sum(SHARES.values()) == 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_random_input_ends_in_anything_but_an_answer_or_a_sentence(seed):
    outcome = fuzz(200, seed)
    assert not outcome.findings, "\n".join([report(outcome), *(trace for _, _, trace in outcome.findings[:3])])
    assert all(outcome.taken[kind] for kind in ("configs", "hardware", "topologies", "plans", "profiles", "cases"))
