"""Items by a key."""

from perfmodel.foundation.grouping import grouped


def test_keys_stand_in_the_order_of_their_first_item():
    assert list(grouped([3, 1, 5, 2], lambda number: number % 2).items()) == [(1, [3, 1, 5]), (0, [2])]
    assert grouped([], lambda item: item) == {}
