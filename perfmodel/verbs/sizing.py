"""The verb that sizes a cluster, for Python: the cluster and the number of chips that train a model by a deadline or within a budget.

import perfmodel

found = perfmodel.size_cluster(
    model="llama-3-8b", cluster=["dgx-h100", "dgx-b200"], global_batch=512, seq_len="8k", tokens="1T", by="30d", budget="200k"
)
print(found.best)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.units import QuantityKind, parse_quantity
from perfmodel.foundation.values import check_progress, doubled, share
from perfmodel.foundation.words import Words, takes
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import NotPredicted, first_reasons
from perfmodel.parallel.request import Request
from perfmodel.parallel.training_run import SECONDS_OF_A_DAY
from perfmodel.planner.sizing import SizedRun, Sizing, size_runs
from perfmodel.planner.ties import TIES
from perfmodel.verbs.requests import check_names, make_requests, needs_chips, setting_of_request
from perfmodel.verbs.searching import search_in
from perfmodel.verbs.setting import find_cluster
from perfmodel.verbs.training import AskedRun, check_objective, read_run, run_in

if TYPE_CHECKING:
    from perfmodel.hardware.cluster import Cluster

#: Default limit of chips, for a cluster without a largest job.
MOST_CHIPS = 16_384
#: By default fewer chips are tried until a run takes this many times the deadline, or longer than this without one. [s]
_BEYOND_DEADLINE, _LONGEST = 2.0, 366 * SECONDS_OF_A_DAY


@takes(asked=Words(Request, several=True), knobs=Words(Knobs, several=True))
def size_cluster(
    *,
    asked: Request,
    knobs: Knobs,
    tokens: float | str,
    by: float | str | None = None,
    budget: float | str | None = None,
    assume: Mapping[str, float | str] | None = None,
    maximum: Mapping[str, int] | None = None,
    ties: float | str = TIES,
    any_framework: bool = False,
    progress: Callable[[float], bool | None] | None = None,
) -> Sizing:
    """Find the front of time and cost of a training run over clusters, numbers of chips and plans: every plan of each is evaluated.

    Cluster, chips and job may be lists. By default chips are powers of two times a node, up to the cluster's largest job or 16,384.

    tokens     to train on, a number or a text such as "15T"
    by         deadline, with failures and checkpoints: "30d", "720h" or days as a number; None: none
    budget     USD, a number or a text such as "2M"; None: none
    assume     values in place of those that `perfmodel assumptions` lists, as for `estimate_run`
    maximum    largest values of knobs, as for `find_plans`
    ties       as for `find_plans`, whose best plan each run has; 0: exactly the fastest
    progress   called with the finished share; if it returns True, the result has the runs so far
    """
    check_progress(progress)
    return size_asked(
        asked,
        knobs,
        {} if maximum is None else maximum,
        run=read_run(tokens, assume),
        deadline=read_deadline(by),
        budget=read_budget(budget),
        ties=share(ties, "ties"),
        any_framework=any_framework,
        progress=progress,
    )


def read_deadline(by: float | str | None) -> float:
    """Return a deadline, infinite if none is given. A bare number is days. [s]"""
    if by is None:
        return math.inf
    return _positive(by if re.search("[a-z]", str(by)) else f"{by} d", QuantityKind.TIME, "by", by, "write 30d")


def read_budget(budget: float | str | None) -> float:
    """Return a budget, infinite if none is given. [USD]"""
    if budget is None:
        return math.inf
    text = budget.strip().removeprefix("$").removesuffix("USD").replace("m", "M") if isinstance(budget, str) else budget
    return _positive(text, QuantityKind.COUNT, "budget", budget, "write 2M or 250k (USD)")


def _positive(text: object, kind: QuantityKind, field: str, given: object, remedy: str) -> float:
    try:
        value = parse_quantity(text, kind, field=field)
    except InputError:
        value = 0.0
    if value <= 0:
        raise bad_field(field, given, f"must be a {'time' if kind is QuantityKind.TIME else 'cost'} above 0", remedy)
    return value


def size_asked(
    asked: Request,
    knobs: Knobs,
    maximum: Mapping[str, int],
    *,
    run: AskedRun,
    deadline: float = math.inf,
    budget: float = math.inf,
    ties: float = TIES,
    any_framework: bool = False,
    plan: Plan | None = None,
    spelled: Callable[[str], str] = str,
    progress: Callable[[float], bool | None] | None = None,
) -> Sizing:
    """Return `size_cluster` of parsed arguments. plan: supplies missing fields; spelled: as for `make_requests`."""
    is_open = asked.chips in (None, []) and asked.nodes in (None, [])
    requests = make_requests(replace(asked, chips=1) if is_open else asked, of_plan=plan is not None, spelled=spelled)
    check_names(requests)
    groups = [[replace(request, chips=chips) for chips in _sizes(request, plan)] if is_open else [request] for request in requests]
    sized: list[SizedRun] = []
    failures: list[NotPredicted] = []
    number, limit = sum(map(len, groups)), _BEYOND_DEADLINE * deadline if deadline < math.inf else _LONGEST
    done, interrupted = 0, False

    def report(part: float) -> bool:
        nonlocal interrupted
        interrupted = interrupted or bool(progress is not None and progress((done + part) / number))
        return interrupted

    for group in groups:
        reasons: list[NotPredicted] = []
        for position, request in enumerate(group):
            if interrupted:
                break
            try:
                setting = setting_of_request(request, plan=plan)
                check_objective("cost", setting, run)
                rule = {"memory_headroom": request.memory_headroom, "risk": request.risk}
                plans = search_in(
                    setting, knobs, maximum, top=1, ties=ties, any_framework=any_framework, also=(),
                    progress=report, **rule,
                ).plans  # fmt: skip
                if not plans:
                    raise InputError(f"chips={setting.cluster.num_chips}: no plan fits on {setting.cluster.name}; use more chips")
                sized_run = SizedRun(prediction=plans[0], run=run_in(setting, plans[0], run))
                if not sized_run.run.goodput:
                    raise InputError(f"chips={sized_run.num_chips}: it fails before it makes progress; assume fewer failures")
            except InputError as error:
                reasons.append(NotPredicted(asked=request.described(), reason=str(error)))
            else:
                sized.append(sized_run)
                if is_open and sized_run.wall_time > limit:
                    done += len(group) - position
                    break
            done += 1
        failures += reasons if not is_open else reasons[:1] if len(reasons) == len(group) else []
    if not sized:
        raise InputError(first_reasons(failures))
    chips = [sized_run.num_chips for sized_run in sized]
    notes = (f"chips: not given; {min(chips):,} to {max(chips):,}, powers of two times a node",) if is_open else ()
    result = size_runs(sized, deadline=deadline, budget=budget)
    return replace(result, not_sized=tuple(failures), notes=notes, interrupted=interrupted)


def _sizes(request: Request, plan: Plan | None) -> tuple[int, ...]:
    """Return numbers of chips to try on a cluster: complete nodes, doubled, the largest first."""
    name = request.cluster if request.cluster is not None or plan is None else plan.cluster
    cluster: Cluster = find_cluster(name, 1 if needs_chips(name) else None)[1]
    most = cluster.largest_job or MOST_CHIPS if needs_chips(name) else cluster.num_chips
    node = min(cluster.chips_per_node, most)
    return tuple(reversed(doubled(node, node * 2 ** int(math.log2(most / node)))))
