"""The verb `limits`, for Python: the largest batch, the longest sequence and the fewest chips with which a job fits.

import perfmodel

found = perfmodel.find_limits(model="llama-3-8b", cluster="dgx-h100", chips=8, seq_len=8192)
print(found.micro_batch.value, found.seq_len.value, found.chips.value)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.memory_headroom import memory_rule
from perfmodel.foundation.values import check_progress, optional_share, read_integer
from perfmodel.foundation.words import Words, takes
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.prediction import LOSS_MOMENT
from perfmodel.parallel.request import Request
from perfmodel.parallel.rows import prediction_row
from perfmodel.verbs.requests import needs_chips, read_risk, stated_settings
from perfmodel.verbs.settable import small_loss
from perfmodel.verbs.setting import Setting, annotated, find_cluster, make_job, make_setting
from perfmodel.workload.job import Optimizer, Precision
from perfmodel.workload.training import FULL_TRAINING

if TYPE_CHECKING:
    from perfmodel.cost.estimate import Estimator
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.planner.limits import Limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """The four limits.

    setting           setting of the limits; if the number of chips was not given, with the fewest that fit
    given_batch       the global batch that was given; 0: none
    memory_headroom   share of the usable memory that a plan that fits leaves free
    risk              probability of running out of memory that a plan may have; None: any
    """

    setting: Setting
    given_batch: int
    micro_batch: Limit
    global_batch: Limit
    seq_len: Limit
    chips: Limit
    memory_headroom: float
    risk: float | None

    @property
    def memory_usable(self) -> float:
        """Usable memory of a chip, of the kind with the least. [byte]"""
        from perfmodel.cost.mixed import pools_of

        return min(pool.machine.memory.usable for pool in pools_of(self.setting.estimator))

    def __repr__(self) -> str:
        return "\n".join(f"{limit.name:<12} {limit.value:>9,}  limited by {limit.limited_by}: {limit.reason}" for limit in self)

    def __iter__(self) -> Iterator[Limit]:
        return iter((self.micro_batch, self.global_batch, self.seq_len, self.chips))


@takes(
    asked=Words(Request, without="nodes batch_tokens", needed="model cluster seq_len"),
    knobs=Knobs,
)
def find_limits(*, asked: Request, knobs: Knobs, any_framework: bool = False, progress: Callable[[float], None] | None = None) -> Limits:
    """Find the largest micro-batch and global batch, the longest sequence and the fewest chips with which some plan fits, and the
    bottleneck of each.

    A knob that is given is fixed, except for its own limit; others are searched. global_batch: None: one sequence for each chip, times the
    micro-batch. chips: None: the fewest. rules: rule sets that are tried, names or your own files.
    any_framework: with plans that the assumed framework cannot run, too.
    progress: called with the finished share of the limits.
    """
    return limits_of(asked, knobs, any_framework=any_framework, progress=progress)


def limits_of(asked: Request, knobs: Knobs, *, any_framework: bool = False, progress: Callable[[float], None] | None = None) -> Limits:
    """Return the result of `find_limits`."""
    from perfmodel.cost.resolve import choose_calibration, resolve_estimator
    from perfmodel.hardware.cluster_text import in_proportion
    from perfmodel.planner.limits import Prober, chip_counts, fewest_chips, largest_global_batch, largest_micro_batch, longest_sequence
    from perfmodel.verbs.searching import space_in

    check_progress(progress)
    headroom, risk = optional_share(asked.memory_headroom, "memory_headroom"), read_risk(asked.risk)
    fits_by = memory_rule(headroom, risk)
    chips = asked.chips
    batch = 0 if asked.global_batch is None else read_integer(asked.global_batch, "global_batch")
    job = make_job(
        asked.model,
        global_batch=batch or 1,
        seq_len=asked.seq_len,
        precision=asked.precision or Precision.BF16_MIXED,
        optimizer=asked.optimizer or Optimizer.ADAMW,
        train=asked.train or FULL_TRAINING,
    )
    positions = job.transformer.positions
    if positions.position == "learned" and job.seq_len > positions.max_position_embeddings:
        rule = f"{job.model.name} has learned positions for {positions.max_position_embeddings} tokens only"
        raise bad_field("seq_len", job.seq_len, rule, "use a shorter sequence")
    assumed = {"calibration": asked.calibration, "profile": asked.profile, "settings": stated_settings(asked)}
    if not needs_chips(asked.cluster) and (stated := find_cluster(asked.cluster, None)[1]).pools:
        chips = stated.num_chips if chips is None else chips
    setting = make_setting(job, asked.cluster, chips=1 if chips is None else chips, **assumed)

    chosen_calibration = choose_calibration(setting.cluster.chip, asked.calibration)

    def make(length: int, count: int, *, profile: ExecutionProfile = setting.estimator.profile) -> Estimator:
        placed = in_proportion(setting.cluster, count)
        return resolve_estimator(replace(job, seq_len=length), placed, calibration=chosen_calibration, profile=profile)

    space, kernel = space_in(setting, knobs, {}, any_framework=any_framework)
    prober = Prober(
        make=make,
        seq_len=job.seq_len,
        chips=setting.cluster.num_chips,
        global_batch=batch,
        space=space if setting.cluster.pools else replace(space, orders=space.orders[:1]),
        attention=kernel,
        headroom=headroom,
        risk=risk,
    )
    report = progress if progress is not None else lambda _: None
    counts = chip_counts(setting.estimator)
    others = {knob: value for knob, value in prober.fixed.items() if knob != "micro_batch"}
    questions: dict[str, Callable[[Prober], Limit]] = {
        "chips": lambda prober: fewest_chips(prober, counts),
        "micro_batch": lambda prober: largest_micro_batch(replace(prober, space=replace(prober.space, fixed=others))),
        "global_batch": largest_global_batch,
        "seq_len": longest_sequence,
    }

    @cache
    def prober_with(loss: str) -> Prober:
        profile = with_settings(setting.estimator.profile, {"loss": loss})
        return replace(prober, make=partial(make, profile=profile), estimators={}, passes={}, tables={})

    def with_small_loss(limit: Limit) -> Limit:
        """Return the limit; if its next value peaks in the loss, its reason includes the limit of a loss that keeps few logits."""
        loss = small_loss(setting.estimator.profile) if limit.memory_moment == LOSS_MOMENT else ""
        if not loss:
            return limit
        value = questions[limit.name](replace(prober_with(loss), chips=prober.chips)).value
        return limit if value == limit.value else replace(limit, reason=f"{limit.reason}; --setting loss={loss} makes it {value:,}")

    fewest = with_small_loss(questions["chips"](prober))
    report(0.25)
    if chips is None:
        if not fewest.value:
            raise InputError(f"chips: no number that {setting.reference} can have is enough ({fewest.reason}); free a knob")
        setting = make_setting(job, asked.cluster, chips=fewest.value, **assumed)
        prober.chips = fewest.value
    answers = {"chips": fewest}
    for name in ("micro_batch", "global_batch", "seq_len"):
        answers[name] = with_small_loss(questions[name](prober))
        report((1 + len(answers)) / 5)
    settings = dict.fromkeys(answers, setting)
    if setting.cluster.pools and fewest.value:  # placement on pools differs with the number of chips
        estimator = make(job.seq_len, fewest.value)
        settings["chips"] = replace(setting, reference=estimator.cluster.name, cluster=estimator.cluster, estimator=estimator)
    named = {
        name: replace(limit, prediction=tuple(map(partial(annotated, setting=settings[name]), limit.prediction)))
        for name, limit in answers.items()
    }
    return Limits(
        setting=setting, given_batch=batch, memory_headroom=fits_by.headroom, risk=fits_by.risk if fits_by.risk < 1.0 else None, **named
    )


def limits_rows(limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer, with the columns of its plan."""
    for limit in limits:
        row = prediction_row(limit.prediction[0]) if limit.prediction else {}
        yield {"limit": limit.name, "value": limit.value, "limited_by": limit.limited_by, "reason": limit.reason, **row}
