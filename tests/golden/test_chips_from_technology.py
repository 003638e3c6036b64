"""Chips made from technology and budgets against the data sheets: V100, A100, H100 and B200.

No number of the technology files belongs to one of the four: one energy of a FLOP and one overhead of a unit are shared by all.
Tolerance: 5 % of the 16-bit rate, as the aim of the constructor is; memory and links are inputs and equal.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.construct import construct_chip
from perfmodel.hardware.reader import load_chip
from perfmodel.hardware.technology import load_chip_spec, shipped_technology

PAIRS = {"v100-spec": "v100-sxm2-32gb", "a100-spec": "a100-sxm-80gb", "h100-spec": "h100-sxm-80gb", "b200-spec": "b200-180gb"}


@pytest.mark.parametrize(("spec", "sheet"), PAIRS.items())
def test_a_chip_from_technology_is_the_chip_of_the_data_sheet(spec, sheet):
    constructed, real = construct_chip(load_chip_spec(spec), shipped_technology()).chip, load_chip(sheet)
    assert constructed.flop_rate(Dtype.FP16) == pytest.approx(real.flop_rate(Dtype.FP16), rel=0.05)
    assert constructed.peak_flop_rate.keys() <= {*real.peak_flop_rate, Dtype.FP64}
    assert (constructed.memory.capacity, constructed.memory.bandwidth) == (real.memory.capacity, real.memory.bandwidth)
    assert [(tier.link, tier.size, tier.topology) for tier in constructed.node.default_tiers] == [
        (tier.link, tier.size, tier.topology) for tier in real.node.default_tiers
    ]


def test_the_node_law_is_worth_what_technology_papers_say():
    """A100 at the next nodes: Kundu et al. 1.3 per node where power binds; DeepFlow 1 / .54 = 1.85 at fixed voltage."""
    spec = replace(load_chip_spec("a100-spec"), die_area=2 * 826e-6)
    for law, gain in (("kundu", 1.3), ("deepflow", 1 / 0.54)):
        rates = [
            construct_chip(replace(spec, logic=node, law=law), shipped_technology()).units_by_power for node in ("n7", "n5", "n3", "n2")
        ]
        assert [after / before for before, after in pairwise(rates)] == pytest.approx([gain] * 3, rel=2e-3)
