"""Parameters of serving's kernels that cannot be are refused by the name of their field."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.hardware.serving_kernels import (
    FEW,
    CachedAttentionModel,
    GroupedWeightModel,
    ServingKernels,
    SmallAllReduceModel,
    WeightProductModel,
)


@pytest.mark.parametrize(
    "model, wrong, sentence",
    [
        (SmallAllReduceModel, {"base_time": 1e-6, "peer_time": -1e-6}, "peer_time=-1e-06: must not be negative"),
        (SmallAllReduceModel, {"base_time": 1e-6, "bandwidth_fraction": 1.5}, "bandwidth_fraction=1.5: must be positive, from 1e-6 to"),
        (WeightProductModel, {"cast_fraction": 0.0}, "cast_fraction=0.0: must be positive"),
        (GroupedWeightModel, {"sharpness": 0.5}, "sharpness=0.5: must be at least 1"),
        (CachedAttentionModel, {"wave_time": -1.0}, "wave_time=-1.0: must not be negative"),
        (ServingKernels, {"grouped_weight": {"int3": GroupedWeightModel()}}, "grouped_weight=int3: must be one of fp8"),
        (ServingKernels, {"weight_product": {"nvfp4" + FEW: WeightProductModel()}}, "weight_product=nvfp4.few: must be one of fp8"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(model, wrong, sentence):
    with pytest.raises(InputError) as raised:
        model(**wrong)
    assert str(raised.value).startswith(sentence)
    assert str(raised.value).endswith("correct the calibration")


def test_experts_of_few_rows_may_have_a_second_kernel():
    assert set(ServingKernels(grouped_weight={"nvfp4" + FEW: GroupedWeightModel()}).grouped_weight) == {"nvfp4.few"}
