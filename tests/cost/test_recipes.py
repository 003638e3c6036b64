"""Products in fewer bits are priced at their own rate, on chips that have it."""

import pytest

from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.resolve import resolve_estimator
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.job import Precision
from perfmodel.workload.models import load_model
from perfmodel.workload.recipes import RECIPES
from tests.cost.jobs import make_job


def predicted(precision, *, cluster="dgx-b200", calibration="b200", profile="megatron"):
    job = make_job(load_model("llama-3-70b"), batch=128, seq_len=8192, precision=precision)
    where = load_cluster(cluster).with_chips(64)
    estimator = resolve_estimator(job, where, calibration=load_calibration(calibration), profile=load_profile(profile))
    plan = make_plan(job, cluster=cluster, num_chips=64, tp=2, pp=4, zero=1, profile=profile)
    return estimator.predict(plan)


def test_steps_are_as_much_shorter_as_published():
    """NVIDIA's recipes of Llama 3 70B take 1.32 to 1.72 times as long in bf16; none on Blackwell scales by history."""
    wide = predicted(Precision.BF16_MIXED)
    for precision in (Precision.FP8_CURRENT, Precision.MXFP8):
        assert 1.32 < wide.step_time / predicted(precision).step_time < 1.75
    assert predicted(Precision.FP8_CURRENT).step_time > predicted(Precision.FP8_DELAYED).step_time


def test_weights_have_low_precision_copies_next_to_them():
    model = load_model("llama-3-70b")
    wide, low = predicted(Precision.BF16_MIXED), predicted(Precision.MXFP8)
    linear = sum(shape.num_elements for shape in model.layer_shapes() if len(shape.shape) == 2)
    assert low.memory["weights"] - wide.memory["weights"] == 20 * linear / 2 * 2 * (1 + 1 / 32)
    assert low.memory["activations"] < wide.memory["activations"]
    assert (low.memory["gradients"], low.memory["optimizer"]) == (wide.memory["gradients"], wide.memory["optimizer"])


@pytest.mark.parametrize("precision", [Precision.FP8_DELAYED, Precision.FP8_CURRENT, Precision.FP8_BLOCK, Precision.MXFP8])
def test_one_copy_is_enough_where_operands_may_lie_in_either_order(precision):
    """Blackwell's units take them so; scales along the other dim are another copy all the same."""
    recipe = RECIPES[str(precision)]
    one = recipe.on(any_operand_order=True)
    assert recipe.on(any_operand_order=False) is recipe
    is_one = precision in (Precision.FP8_DELAYED, Precision.FP8_CURRENT)
    assert (one.weight_copies, one.activation_copies, one.gradient_copies) == ((1, 1, 1) if is_one else (2, 2, 2))
    linear = sum(shape.num_elements for shape in load_model("llama-3-70b").layer_shapes() if len(shape.shape) == 2)
    wide, low = predicted(Precision.BF16_MIXED), predicted(precision)
    assert [load_cluster(name).chip.units.any_operand_order for name in ("dgx-b200", "dgx-h100")] == [True, False]
    copies = (1 if is_one else 2) * recipe.copy_bytes
    assert low.memory["weights"] - wide.memory["weights"] == 20 * linear / 2 * copies
    reads = 4.0 if recipe.reads_twice else 2.0
    bandwidth = resolve_machine(load_cluster("dgx-b200"), load_calibration("b200"), dtype=Dtype.BF16).memory.bandwidth
    assert low.parts["weight_casts"] * bandwidth == pytest.approx(80 * linear / 2 * (reads + copies), rel=1e-6)


def test_one_copy_may_replace_the_weights_in_16_bits():
    """Parameters in fp8 (`fp8_params`): where one copy is enough, a weight of a product takes its bytes alone."""
    linear = sum(shape.num_elements for shape in load_model("llama-3-70b").layer_shapes() if len(shape.shape) == 2)
    wide = predicted(Precision.BF16_MIXED)
    low = predicted(Precision.FP8_CURRENT, profile="megatron+fp8_params")
    assert low.memory["weights"] - wide.memory["weights"] == 20 * linear / 2 * (RECIPES["fp8-current"].copy_bytes - 2.0)


def test_utilisation_is_of_what_most_is_computed_in():
    assert predicted(Precision.MXFP8).conditions.peak_dtype == "fp8"


@pytest.mark.parametrize(
    "precision, cluster, calibration", [(Precision.MXFP8, "dgx-h100", "h100"), (Precision.FP8_BLOCK, "dgx-a100", "a100")]
)
def test_a_chip_without_the_units_is_refused(precision, cluster, calibration):
    with pytest.raises(InputError, match=f"precision={precision}: .* has no units for it") as refused:
        predicted(precision, cluster=cluster, calibration=calibration)
    remedy = str(refused.value).rpartition("; ")[2]
    named = remedy.removeprefix("use ").removesuffix(" or another chip").split(", ")
    assert {"bf16-mixed", "fp16-mixed", "fp32"} <= set(named)
    assert ("fp8-delayed" in named) == (cluster == "dgx-h100")
    for other in named:
        assert predicted(Precision(other), cluster=cluster, calibration=calibration).step_time > 0
