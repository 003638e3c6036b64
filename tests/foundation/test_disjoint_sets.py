"""Items that are joined, one after another, are one set; no others are."""

import random

from perfmodel.foundation.disjoint_sets import DisjointSets


def test_sets_are_those_of_a_search_through_the_joins():
    rng = random.Random(1)
    for _ in range(20):
        joins = [(rng.randrange(40), rng.randrange(40)) for _ in range(rng.randrange(40))]
        sets = DisjointSets(range(40))
        for item, other in joins:
            sets.join(item, other)
        representatives = sets.representatives()
        for item in range(40):
            reached, grown = {item}, {-1}
            while grown:
                grown = {b for pair in joins for a, b in (pair, pair[::-1]) if a in reached} - reached
                reached |= grown
            assert {other for other in range(40) if representatives[other] == representatives[item]} == reached


def test_an_item_that_was_not_named_is_a_set_of_its_own():
    sets = DisjointSets[str]()
    assert "a" not in sets
    assert sets.find("a") == "a"
    assert "a" in sets
