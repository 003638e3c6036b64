"""Names of plans that are not plan files."""

from __future__ import annotations

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan_file import read_plan


@pytest.mark.parametrize("model", ["llama-3-70b", "Qwen/Qwen3-32B"])
def test_a_model_in_place_of_a_plan_is_named_as_such(model):
    with pytest.raises(InputError, match=rf"^plan={model}: .*it is a model: give it as --model {model}$"):
        read_plan(model)


def test_an_unknown_name_lists_the_shipped_plans():
    with pytest.raises(InputError, match=r"plan=my-plan: no such file and no expert plan; .*megatron-22b"):
        read_plan("my-plan")
