"""A full training run: failures, checkpoints, goodput, energy, carbon and cost around predicted steps.

No quantity here affects a step time. Constants are `perfmodel.hardware.assumptions`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import itemsize
from perfmodel.hardware.assumptions import Assumptions
from perfmodel.parallel.training_run import SECONDS_OF_A_DAY, SECONDS_OF_AN_HOUR
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.projection import NO_PROJECTION, projection_of
from perfmodel.workload.training import Method, num_trained_parameters

#: Chips to which the failure rate refers.
CHIPS_OF_A_NODE = 8
#: Days without repairs that the spare nodes must cover.
_DAYS_OF_SPARES = 7.0
_GIGABYTE, _JOULES_OF_A_KILOWATT_HOUR, _GRAMS_OF_A_KILOGRAM = 1e9, 3.6e6, 1e3


def daly_interval(*, stall: float, mtbf: float) -> float:
    """Return the time between two checkpoints that wastes least. [s]

    tau = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C   if C < 2 M, else M

    stall  C  time for which training stands still for a checkpoint  [s]
    mtbf   M  mean time between failures of the job                  [s]

    Source: Daly, Future Generation Computer Systems 22(3), 2006. Without the bracket and -C it is Young's (CACM 17(9), 1974).
    """
    C, M = stall, mtbf
    if C >= 2.0 * M:
        return M
    x = C / (2.0 * M)
    return math.sqrt(2.0 * C * M) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - C


def goodput(*, interval: float, stall: float, restart: float, mtbf: float) -> float:
    """Return the share of wall time that advances training, for exponentially distributed failures. [-]

    tau / (M e^(R / M) (e^((tau + C) / M) - 1))

    interval  tau  training between two checkpoints            [s]
    stall     C    time of one checkpoint                      [s]
    restart   R    from a failure to the next step             [s]
    mtbf      M    mean time between failures of the job       [s]

    Source: Daly, Future Generation Computer Systems 22(3), 2006.
    """
    tau, C, R, M = interval, stall, restart, mtbf
    exponent = (tau + C + R) / M
    if exponent > 700.0:  # e^x overflows
        return 0.0
    return tau / (M * math.exp(R / M) * math.expm1((tau + C) / M))


def poisson_quantile(mean: float, probability: float) -> int:
    """Return the least k with P(N <= k) >= probability of a Poisson variable N. [-]"""
    if mean > 500.0:  # e^-mean underflows; the normal approximation is within one
        from statistics import NormalDist

        return math.ceil(mean + math.sqrt(mean) * NormalDist().inv_cdf(probability))
    k, term = 0, math.exp(-mean)
    total = term
    while total < probability and term > 0.0:
        k += 1
        term *= mean / k
        total += term
    return k


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Training on a number of tokens, with its interruptions.

    days                 of steps alone, without a pause                          [day]
    goodput              share of the wall time that advances training            [-]
    wall_days            days / goodput                                           [day]
    chip_hours           wall time times chips                                    [h]
    failures             expected unexpected interruptions                        [-]
    mtbf                 mean time between these                                  [s]
    checkpoint_bytes     weights and optimizer state, each byte once              [byte]
    checkpoint_stall     time for which a checkpoint stops training               [s]
    checkpoint_write     until the file is complete, in the background            [s]
    checkpoint_interval  between two checkpoints, the best one                    [s]
    restart_time         after a failure                                          [s]
    spare_nodes          needed for a week of failures                            [-]
    energy               of the data centre; 0: the chip's power is not known     [J]
    carbon               CO2 equivalents                                          [kg]
    cost                 of the chip-hours; 0: the price is not known             [USD]
    """

    tokens: float
    days: float
    goodput: float
    wall_days: float
    chip_hours: float
    failures: float
    mtbf: float
    checkpoint_bytes: float
    checkpoint_stall: float
    checkpoint_write: float
    checkpoint_interval: float
    restart_time: float
    spare_nodes: int
    energy: float
    carbon: float
    cost: float

    def to_dict(self) -> dict[str, float | None]:
        """Return the fields as in `--json`: SI units, days and hours according to their names; None for unknown values."""
        content = dataclasses.asdict(self)
        return content | dict.fromkeys(name for name in ("energy", "carbon", "cost") if not content[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Totals of a run whose steps take a number of days without a pause; arrays for several plans on the same chips.

    The names and units are those of `TrainingRun`.
    """

    wall_days: Column
    chip_hours: Column
    energy: Column
    carbon: Column
    cost: Column


def checkpoint_bytes(job: TrainingJob, *, stores_master: bool = False) -> float:
    """Return the size of a checkpoint that training can continue from: trained weights, master copy, optimizer state. [byte]

    N (p + m + s): parameters, their master copy if there is one, the optimizer's states with projections of gradients. 14 byte with
    AdamW in bf16-mixed.

    stores_master  the master copy is the stored weight (FSDP2), without p: 12 byte
    """
    policy, trained = job.policy, num_trained_parameters(job.transformer, job.train)
    master = itemsize(policy.master) if policy.has_master_copy else 0.0
    copies = master if stores_master and master else itemsize(policy.parameter) + master
    low = projection_of(job.transformer, job.train) if job.train.method is Method.GALORE else NO_PROJECTION
    states = low.state * job.optimizer.state_bytes(itemsize(policy.optimizer_state)) + low.matrix * itemsize(policy.gradient)
    return trained * (copies + states)


def energy_of(chip_hours: Column, chip_watts: float, assumptions: Assumptions) -> Column:
    """Return the energy of the data centre: chip-hours x W x server factor x utilisation x PUE. [J]

    chip_watts   thermal design power   [W]

    Source: Patterson et al., arXiv 2104.10350.
    """
    value = assumptions.value
    watts = chip_watts * value("server_power_factor") * value("power_utilization") * value("pue")
    return chip_hours * SECONDS_OF_AN_HOUR * watts


def carbon_of(energy: Column, assumptions: Assumptions) -> Column:
    """Return the CO2 equivalents of an energy. [kg]"""
    return energy / _JOULES_OF_A_KILOWATT_HOUR * assumptions.value("carbon_intensity") / _GRAMS_OF_A_KILOGRAM


def run_totals(
    days: Column, *, goodput: float, num_chips: int, chip_watts: float, price_per_hour: float, assumptions: Assumptions
) -> RunTotals:
    """Return the totals of runs whose steps take `days` without a pause. They increase with the days.

    chip_watts       thermal design power; 0: not known   [W]
    price_per_hour   of a chip; 0: not known              [USD/h]
    """
    wall_days = days / goodput if goodput > 0 else days * math.inf
    chip_hours = wall_days * SECONDS_OF_A_DAY / SECONDS_OF_AN_HOUR * num_chips
    energy = energy_of(chip_hours, chip_watts, assumptions)
    return RunTotals(
        wall_days=wall_days,
        chip_hours=chip_hours,
        energy=energy,
        carbon=carbon_of(energy, assumptions),
        cost=chip_hours * (assumptions.price or price_per_hour),
    )


def training_run(
    *,
    tokens: float,
    days: float,
    num_chips: int,
    checkpoint_bytes: float,
    chip_watts: float,
    price_per_hour: float,
    assumptions: Assumptions,
) -> TrainingRun:
    """Return the run of steps that take `days` without a pause.

    days              of steps alone                            [day]
    checkpoint_bytes  weights and optimizer state of the job    [byte]
    chip_watts        thermal design power; 0: not known        [W]
    price_per_hour    of a chip; 0: not known                   [USD/h]
    """
    value = assumptions.value
    rate = value("failures_per_node_day") * num_chips / CHIPS_OF_A_NODE
    mtbf = SECONDS_OF_A_DAY / rate
    stall = value("checkpoint_overhead") + checkpoint_bytes / num_chips / (value("checkpoint_copy_bandwidth") * _GIGABYTE)
    write = checkpoint_bytes / (value("storage_bandwidth") * _GIGABYTE)
    interval = max(daly_interval(stall=stall, mtbf=mtbf), write)
    share = goodput(interval=interval, stall=stall, restart=value("restart_time"), mtbf=mtbf)
    totals = run_totals(
        days, goodput=share, num_chips=num_chips, chip_watts=chip_watts, price_per_hour=price_per_hour, assumptions=assumptions
    )
    wall_days = float(totals.wall_days)
    return TrainingRun(
        tokens=tokens,
        days=days,
        goodput=share,
        wall_days=wall_days,
        chip_hours=float(totals.chip_hours),
        failures=wall_days * rate,
        mtbf=mtbf,
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_stall=stall,
        checkpoint_write=write,
        checkpoint_interval=interval,
        restart_time=value("restart_time"),
        spare_nodes=min(poisson_quantile(_DAYS_OF_SPARES * rate, value("spares_confidence")), math.ceil(num_chips / CHIPS_OF_A_NODE)),
        energy=float(totals.energy),
        carbon=float(totals.carbon),
        cost=float(totals.cost),
    )
