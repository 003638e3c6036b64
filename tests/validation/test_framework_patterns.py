"""Names of frameworks in published runs, and the defaults that they stand for."""

import re

import pytest

from perfmodel.frameworks.profile import list_profiles
from perfmodel.parallel.framework_ref import SETTINGS
from perfmodel.validation.case_settings import READ_APART
from perfmodel.validation.framework_patterns import framework_of, framework_patterns


def test_entries_have_names_of_their_own_and_known_profiles_and_settings():
    entries = framework_patterns()
    assert len({entry.name for entry in entries}) == len(entries) > 20
    for entry in entries:
        assert re.compile(entry.pattern)
        assert {entry.profile, entry.sharded or entry.profile} <= set(list_profiles())
        assert (
            set(entry.options.settings) | {name for stated in entry.options.of_method.values() for name in stated}
            <= set(SETTINGS) | READ_APART
        )
        assert entry.figures.memory_kind in ("reserved", "allocated")
        assert entry.figures.memory_rank in ("first", "last", "fullest")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nanotron v0.5", "nanotron"),
        ("Megatron-LM (2022)", "megatron-2022"),
        ("Megatron-DeepSpeed", "deepspeed"),
        ("DeepSpeed ZeRO-3", "deepspeed-zero3"),
        ("Megatron-LM, SimuMax scripts", "simumax"),
        ("NeMo Automodel", "automodel"),
        ("NeMo 24.07", "nemo"),
        ("torchtitan", "torchtitan"),
        ("a loop of our own", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_first_pattern_that_matches_wins(text, name):
    assert framework_of(text).name == name


def test_an_entry_takes_over_the_fields_of_its_base():
    bridge, nemo = framework_of("NeMo Megatron-Bridge"), framework_of("NeMo")
    assert bridge.profile == nemo.profile == "nemo"
    assert bridge.options == nemo.options
    assert (bridge.experts.folds_experts, nemo.experts.folds_experts) == (True, False)
