import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_room import DEFAULT_HEADROOM, Verdict, check_headroom, verdict


@pytest.mark.parametrize(
    ("needed", "headroom", "expected"),
    [
        (90, 0.1, Verdict.FITS),
        (91, 0.1, Verdict.TIGHT),
        (100, 0.1, Verdict.TIGHT),
        (101, 0.1, Verdict.DOES_NOT_FIT),
        (100, 0.0, Verdict.FITS),
        (101, 0.0, Verdict.DOES_NOT_FIT),
        (96, DEFAULT_HEADROOM, Verdict.TIGHT),
    ],
)
def test_three_verdicts(needed, headroom, expected):
    assert verdict(needed, 100.0, headroom) is expected


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan")])
def test_a_headroom_is_a_share(headroom):
    with pytest.raises(InputError, match=r"memory_headroom=.*: must be a share"):
        check_headroom(headroom)
