"""Settings of published runs in the words of their sources."""

import pytest

from perfmodel.frameworks.profile import load_profile
from perfmodel.validation.case_settings import context_of_case, settings_of_case


@pytest.mark.parametrize(
    ("stated", "settings"),
    [
        ({"context_parallel": "ulysses"}, {"cp_form": "ulysses"}),
        ({"context_parallel": "ring (torch, FSDP2 shards over the same ranks)"}, {}),
        ({"loss": "chunked_nll"}, {"loss": "chunked"}),
        ({"loss": "liger fused linear cross-entropy"}, {"loss": "fused"}),
        ({"loss": "full logits"}, {"loss": "whole"}),
        ({"attention_kernel": "sdpa, cuDNN"}, {"attention_kernel": "cuDNN"}),
        ({"activation_checkpointing_offload": True}, {"checkpoint_offload": True}),
        ({"gradient_checkpointing": "offloaded to host"}, {"checkpoint_offload": True}),
        ({"gradient_checkpointing": "standard"}, {}),
        ({"param_offload": False, "optimizer_offload": True}, {"parameter_offload": False, "optimizer_offload": True}),
        (None, {}),
    ],
)
def test_a_run_may_state_its_settings_as_its_source_does(stated, settings):
    assert settings_of_case(stated) == settings


def test_ulysses_needs_a_key_value_head_for_each_rank():
    assumed: list[str] = []
    plain, ulysses = load_profile("torch-fsdp2"), load_profile("torch-fsdp2+cp_form=ulysses")
    of = {"tp": 1, "num_key_value_heads": 8, "assumed": assumed}
    assert context_of_case(ulysses, cp=8, **of) == (ulysses, "ulysses")
    assert context_of_case(plain, cp=8, **of) == (plain, None)
    assert not assumed
    profile, rules = context_of_case(ulysses, cp=16, **of)
    assert (profile.communication.context_form, rules) == ("zigzag", None)
    assert assumed == ["cp_form"]
