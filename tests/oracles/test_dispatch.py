"""Exchanges of experts against published figures: bytes by exact arithmetic, times by the calibrations that ship.

Sources: Megatron-Core's report on mixtures of experts (arXiv 2603.07685), table 7: 4,096 tokens of 7,168 entries in bf16 to 8 of 256
experts; DeepEP's README, normal kernels, the same with dispatch in fp8. Both route as DeepSeek-V3 does (4 of 8 groups).
"""

from math import comb

import numpy as np
import pytest

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.evaluate import distinct_shares
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.copies import Copies
from perfmodel.foundation.dtypes import Dtype
from perfmodel.validation.case_plan import HardwareOfCase
from perfmodel.validation.run_machine import machine_of_run

TOKENS, HIDDEN = 4096, 7168
V3 = Copies(slots=256, chosen=8, groups=8, top_groups=4)

#: ranks -> us of HybridEP's and of NCCL's dispatch, of HybridEP's and of NCCL's combine.
REPORT = {
    "gb200-nvl72": {8: (391, 735, 353, 741), 16: (578, 743, 527, 765), 32: (612, 769, 646, 758), 64: (675, 930, 744, 827)},
    "h100-sxm-80gb": {8: (661, 1265, 624, 1277), 16: (1485, 5774, 1688, 5628), 32: (3064, 8059, 3088, 7815), 64: (4626, 9164, 4398, 8727)},
}
#: ranks -> GB/s of dispatch in fp8 with scales for 128 entries, and of combine in bf16: tokens times distinct nodes (ranks, in one node).
DEEP_EP = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}


def exchange_time(chip, ranks, *, copies, bytes_each=2.0):
    """[s] of one dispatch or combine"""
    per_node = 4 if chip == "gb200-nvl72" else 8
    hardware = HardwareOfCase(chip=chip, chips_per_node=per_node, num_chips=64, inter_node_bandwidth_per_chip=None)
    machine = machine_of_run(hardware, Dtype.BF16)
    size = np.array([[float(ranks)]])
    inside = [np.minimum(size, tier) for tier in machine.tier_sizes]
    shares = None if copies is None else distinct_shares((copies,), np.array([1]), size, inside)
    num_bytes = TOKENS * V3.chosen * HIDDEN * bytes_each
    kind = CollectiveKind.ALL_TO_ALL
    return collective_time(kind, num_bytes, group_size=size, inside=inside, machine=machine, exchanged=shares).item()


@pytest.mark.parametrize(("slots", "chosen", "places"), [(8, 2, 8), (128, 8, 8), (128, 8, 32), (128, 4, 16), (384, 8, 64)])
def test_distinct_places_of_a_free_choice_are_those_of_combinatorics(slots, chosen, places):
    missed = comb(slots - slots // places, chosen) / comb(slots, chosen)
    assert Copies(slots=slots, chosen=chosen).distinct(places) == pytest.approx(places * (1 - missed), rel=1e-12)


@pytest.mark.parametrize(
    ("copies", "places", "simulated"),
    [
        (V3, 64, 7.48),
        (V3, 8, 3.98),
        (Copies(slots=160, chosen=6, groups=8, top_groups=3), 8, 2.99),
        (Copies(slots=256, chosen=8), 64, 7.68),
        (Copies(slots=256, chosen=8), 8, 5.29),
        (Copies(slots=128, chosen=8), 8, 5.34),
        (Copies(slots=8, chosen=2), 8, 2.0),
        (V3, 1, 1.0),
    ],
)
def test_distinct_places_agree_with_simulated_routing(copies, places, simulated):
    assert copies.distinct(places) == pytest.approx(simulated, rel=0.01)


def test_bytes_of_a_rank_by_hand():
    size, inside = np.array([[64.0]]), [np.array([[8.0]]), np.array([[64.0]])]
    local, remote = distinct_shares((V3,), np.array([1]), size, inside)
    sent = TOKENS * HIDDEN * V3.chosen
    assert remote.item() * sent == pytest.approx(TOKENS * HIDDEN * 4.0 * 7 / 8)  # four nodes, one in eight of them its own
    assert local.item() * sent == pytest.approx(TOKENS * HIDDEN * V3.distinct(64) * 63 / 64)
    plain = distinct_shares((V3,), np.array([0]), size, inside)
    assert [share.item() for share in plain] == [7 / 64, 56 / 64]


def errors_of_the_report(chip):
    errors = []
    for ranks, measured in REPORT[chip].items():
        times = [exchange_time(chip, ranks, copies=copies) * 1e6 for copies in (V3, None)]
        errors += [time / published - 1 for time, published in zip(times * 2, measured, strict=True)]
    return errors


def errors_of_deep_ep():
    errors = []
    for ranks, rates in DEEP_EP.items():
        for bytes_each, rate in zip((1 + 4 / 128, 2.0), rates, strict=True):
            visited = V3.distinct(ranks / 8 if ranks > 8 else 8)
            time = TOKENS * HIDDEN * bytes_each * visited / (rate * 1e9)
            errors.append(exchange_time("h800-sxm-80gb", ranks, copies=V3, bytes_each=bytes_each) / time - 1)
    return errors


@pytest.mark.parametrize("chip", REPORT)
def test_dispatch_and_combine_of_the_report(chip):
    errors = errors_of_the_report(chip)
    assert np.median(np.abs(errors)) <= 0.12
    assert max(map(abs, errors)) <= 0.25


def test_dispatch_and_combine_of_deep_ep():
    errors = errors_of_deep_ep()
    assert np.median(np.abs(errors)) <= 0.12
    assert max(map(abs, errors)) <= 0.2
