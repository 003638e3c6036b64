"""The first index at which a condition holds is found in few calls."""

import pytest

from perfmodel.foundation.bisection import first_index


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 100])
def test_the_first_index_is_found_in_few_calls(length):
    for first in range(length + 1):
        tried = []
        index_found = first_index(length, lambda index, first=first, tried=tried: tried.append(index) or index >= first)
        assert index_found == (first if first < length else None)
        assert len(tried) == len(set(tried))
        assert max(tried) <= max(2 * first, 1)
        assert len(tried) <= 2 * (first + 1).bit_length()
