"""Fitted figures of frameworks: the files are as one command writes them."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab.fitted import file_text, fitted_profiles, main
from lab.left_out.fits import FITS, MEMORY_FITS
from perfmodel.frameworks.profile import GENERIC, list_profiles
from perfmodel.frameworks.shipped import FittedNumber, fitted_numbers
from tests.marks import NIGHTLY

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = GOLDEN / "published_training.jsonl.gz"
NUMBER = FittedNumber(value=2e-3, spread=1e-4, n=5, models=2, chips=("h100-sxm-80gb",), date="2026-01-02", how="step times")


def constants_by_profile():
    constants = {name: set() for name in list_profiles() if name != GENERIC}
    for fit in FITS.values():
        for profile in (*fit.profiles, *fit.lends_to):
            constants[profile] |= {item.constant.name for item in fit.constants} | set(fit.lent)
    for name, fit in MEMORY_FITS.items():
        for profile in (name, *fit.lends_to):
            constants[profile] |= {item.constant.name for item in fit.constants}
    return constants


def test_the_files_hold_what_is_fitted_and_nothing_else():
    assert {name: set(fitted_numbers(name)) for name in constants_by_profile()} == constants_by_profile()


def kept(fits, names):
    return {name: fit for name, fit in fits.items() if name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "frameworks", [("composer-fsdp", "megatron-2020", "torchtitan"), pytest.param((*FITS, *MEMORY_FITS), id="all", marks=NIGHTLY)]
)
def test_the_shipped_numbers_are_what_the_command_writes(frameworks, monkeypatch):
    monkeypatch.setattr("lab.left_out.fits.FITS", kept(FITS, frameworks))
    monkeypatch.setattr("lab.left_out.fits.MEMORY_FITS", kept(MEMORY_FITS, frameworks))
    for name, numbers in fitted_profiles(CASES).items():
        if name not in frameworks:
            continue
        shipped = fitted_numbers(name)
        assert set(numbers) <= set(shipped)
        for constant, number in numbers.items():
            assert number.value == pytest.approx(shipped[constant].value, rel=0.02, abs=0.02 * number.spread), (name, constant)
            assert replace(number, value=0, spread=0, date="") == replace(shipped[constant], value=0, spread=0, date="")


def test_a_number_keeps_its_date_while_it_stays():
    later = replace(NUMBER, date="2026-03-04")
    same, moved = (file_text({"host_launch_time": number}, {"host_launch_time": NUMBER}) for number in (later, replace(later, value=3e-3)))
    assert "value: 2 ms" in same
    assert "2026-01-02" in same
    assert "2026-03-04" in moved


def test_bad_input_is_answered_with_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
