"""The stated settings of a run change the defaults of its framework, and unknown settings are reported."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.settings import COMPILED_LAUNCH, GRAPH_LAUNCH, with_settings
from perfmodel.parallel.eager import EAGER_ADAMW, EAGER_RMS_NORM
from perfmodel.parallel.framework_ref import FrameworkRef, framework_named

GENERIC = load_profile("generic")


@pytest.mark.parametrize(
    ("stated", "field", "value"),
    [
        ("compile", "rms_norm_traffic", 1.0),
        ("compile=true", "fuses_elementwise", True),
        ("compile", "host_launch_time", COMPILED_LAUNCH),
        ("cuda_graphs", "host_launch_time", GRAPH_LAUNCH),
        ("fused_rmsnorm=true", "rms_norm_traffic", 1.0),
        ("fused_rmsnorm=no", "rms_norm_traffic", EAGER_RMS_NORM),
        ("fused_cross_entropy", "fused_cross_entropy", True),
        ("async_tp", "tp_overlap_fraction", 0.5),
        ("tp_async=false", "tp_backward_overlap_fraction", 0.0),
        ("fp32_gradient_accumulation", "accumulate_dtype", "fp32"),
        ("fp32_gradient_reduction=no", "reduce_dtype", "compute"),
        ("blocking_sends", "pp_overlap", False),
        ("whole_gradient_sends", "sends_whole_gradients", True),
        ("mask_sends", "sends_attention_mask", True),
        ("nccl_rings", "flat_rings", True),
        ("gradient_bucketing=off", "overlaps_gradients", ()),
        ("fused_optimizer=no", "optimizer_bytes_factor", EAGER_ADAMW),
        ("gradient_bucket_mb=25", "bucket_bytes", 25 * 2.0**20),
        ("attention_kernel=flash1", "attention_kernel", "flash1"),
        ("attention_kernel=cudnn", "attention_kernel", "cudnn"),
    ],
)
def test_a_setting_is_stated_with_the_profiles_name(stated, field, value):
    profile = load_profile(f"generic+{stated}")
    assert profile.option(field) == value
    assert load_profile(profile.name) == profile
    assert framework_named(profile.name) == "generic"
    assert profile.option(field) != GENERIC.option(field)


def test_several_settings_are_stated_together():
    profile = load_profile("torch-fsdp2+compile+async_tp=true")
    assert (profile.kernels.rms_norm_traffic, profile.timing.tp_overlap_fraction) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("compil", "setting=compil: is not known; did you mean 'compile'"),
        ("compile=perhaps", "setting compile='perhaps': must be true or false"),
        ("attention_kernel=fast", "must be one of flash1, flash2, flash3, cudnn"),
        ("gradient_bucket_mb=-1", "must be a number from 0.001"),
        ("gradient_bucket_mb=nan", "must be a number from 0.001"),
        ("", "setting=: is not known"),
    ],
)
def test_what_is_not_known_is_one_sentence(stated, message):
    with pytest.raises(InputError) as error:
        load_profile(f"generic+{stated}")
    assert message in str(error.value)


def test_a_published_run_may_state_what_means_nothing_here():
    assert with_settings(GENERIC, {"moon_phase": "full", "attention_kernel": "unheard of", "compile": None}) == GENERIC
    assert FrameworkRef.parse("generic+compile+fused_rmsnorm=false").settings == {"compile": True, "fused_rmsnorm": False}
