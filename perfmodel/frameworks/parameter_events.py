"""Parameter events of a framework in a step, by its options (`parallel/algebra/parameters.py` has the possible events)."""

from __future__ import annotations

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import ParameterLayout
from perfmodel.parallel.algebra.parameters import ParameterEvent, parameter_events


def profile_events(
    parameter: ParameterLayout, profile: ExecutionProfile, *, zero: int, pipelined: bool, joins_ends: bool
) -> tuple[ParameterEvent, ...]:
    """Return `parameter_events` for the options of `profile`. joins_ends: `is_one_end_unit` of all parameters."""
    keeps = pipelined and profile.stages.pipeline_keeps_parameters
    return parameter_events(
        parameter,
        zero=zero,
        stores_shards_zero2=profile.state.zero2_stores_shards,
        # stages 0 and 1 accumulate locally; a pipeline that keeps parameters gathered reduces once as well
        reduces_each_microbatch=(profile.communication.reduces_each_microbatch and zero >= 2 and not keeps)
        or (profile.communication.pipeline_reduces_each_microbatch and zero == 0 and pipelined),
        keeps_gathered=keeps,
        reduces_tp_first=profile.communication.reduces_tp_gradients_first,
        is_wanted_at_once=parameter.is_end and (joins_ends or parameter.is_last),
    )
