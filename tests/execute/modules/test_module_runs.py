"""Users' modules under plans in which every operator has a sharding of its own: gradients equal to those of the module itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.execute.modules.module import UserModule
from perfmodel.execute.modules.refuse import check_module_plan, unshardable_dims
from perfmodel.execute.per_operator.options import ModuleReference, NetworkOptions
from perfmodel.execute.per_operator.run import check_network_plan
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.per_operator.measurement import NetworkCheck
from perfmodel.parallel.plan import Plan
from perfmodel.verbs.networks import shard_network
from perfmodel.workload.network_model import NetworkModel
from tests.execute.modules import parallel_worker
from tests.execute.modules.user_modules import MODULES
from tests.execute.per_operator.plans import TWO, random_plan
from tests.marks import mostly_nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def reference(name: str) -> ModuleReference:
    factory, inputs = MODULES[name]
    return ModuleReference(name=f"{UserModules}:{factory}", inputs=tuple(inputs.split()))


UserModules = "tests.execute.modules.user_modules"
#: In float32. Nine modules stay below 1e-6; a ResNet, whose variances are differences of sums, reaches 1.6e-5.
TOLERANCE = 2e-5


def check(name: str, plan: Plan, groups, dtype: str = "float32") -> NetworkCheck:
    module = reference(name)
    network = UserModule.read(module.name, module.inputs).network
    plan = replace(plan, job=replace(plan.job, model=NetworkModel(name=network.name, inputs=module.inputs)))
    options = NetworkOptions(dtype=dtype, learning_rate=0.0, module=module)
    return check_network_plan(network, plan, options, group=groups(plan.num_chips))


def random_runnable_plan(name: str, seed: int) -> Plan:
    """Return a random plan on two processes. Dims that are refused if cut, as those of an LSTM's state or of a group norm, stay whole."""
    module = reference(name)
    user = UserModule.read(module.name, module.inputs)
    plan = random_plan(user.network, TWO, seed)
    shardings = {}
    for operator, sharding in plan.cuts.shardings.items():
        number = user.imported.sources[operator].vertex
        refused = unshardable_dims(user.imported.graph.vertices[number], user.arguments(number))
        uncut = {part for dim in refused for part, _ in user.imported.dims_of(number, dim)}
        shardings[operator] = {part: axes for part, axes in sharding.items() if part not in uncut}
    plan = replace(plan, sharding=replace(plan.cuts, shardings=shardings))
    check_module_plan(user, plan)
    return plan


@pytest.mark.parametrize("name", mostly_nightly(list(MODULES), ["mlp", "resnet18", "mixtral", "bert", "unet", "lstm"]))
def test_random_plans_on_two_processes_equal_the_module(name, groups):
    for seed in (0, 1):
        assert check(name, random_runnable_plan(name, seed), groups).gradient_error < TOLERANCE


@pytest.mark.parametrize("name", mostly_nightly(list(MODULES), ["mlp", "bert"]))
def test_searched_plans_equal_the_module(name, groups):
    module = reference(name)
    plan = shard_network(module.name, inputs=module.inputs, cluster="localhost", chips=2).best.plan
    assert check(name, plan, groups).gradient_error < TOLERANCE


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", mostly_nightly(["mlp", "resnet18", "llama"], ["mlp", "llama"]))
def test_a_parallelized_module_trains_in_the_users_loop(name, zero, groups):
    module = reference(name)
    plan = shard_network(module.name, inputs=module.inputs, cluster="localhost", chips=2, zero=zero).best.plan
    for differences, errors in groups(2).call(parallel_worker.train, MODULES[name][0], plan, module.inputs, 3):
        assert errors
        assert max(errors.values()) < TOLERANCE
        assert max(differences) < 1e-4


def test_what_is_not_run_is_refused_by_operator_dim_and_axis():
    module = reference("lstm")
    user = UserModule.read(module.name, module.inputs)
    plan = random_plan(user.network, TWO, 0)
    shardings = {name: {} for name in plan.cuts.shardings}
    cut = replace(plan, sharding=replace(plan.cuts, shardings=shardings | {"lstm": {"e": ("p",)}}, held={}))
    with pytest.raises(InputError, match=r"operator lstm \(aten.lstm.input\), dim e, axis p: is not run with this dim cut; use a plan"):
        check_module_plan(user, cut)
