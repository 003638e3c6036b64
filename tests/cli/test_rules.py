"""A rule set from its file to a number: predicted, saved, searched, explained, and refused where it contradicts other options."""

import json

import pytest
import yaml

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.rules import load_rule_set
from perfmodel.parallel.plan_file import plan_from_dict, read_plan
from perfmodel.planner.uniform.space import Space
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all
from tests.planner.searches import search_plans

JOB = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 16, "global_batch": 16, "seq_len": 16384}
FLAGS = "--model llama-3-8b --cluster dgx-h100 --chips 16 --global-batch 16 --seq-len 16384"
TIED = "--model gpt2 --cluster dgx-h100 --chips 2 --global-batch 2 --seq-len 64"
MLP_ONLY = """\
name: mlp-only
source: a test
rules:
  batch: [dp_replicate, dp_shard]
  ffn: [tp]
  vocab_out: [tp]
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mlp-only.yaml"
    path.write_text(MLP_ONLY, encoding="utf-8")
    return path


@pytest.fixture
def say(call):
    """Run a command line and return the text that it prints."""

    def run(line):
        code, out, err = call(*line.split())
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def ask(say):
    """The object that a command line prints with --json."""
    return lambda line: json.loads(say(f"{line} --json"))


@pytest.fixture
def refused(call):
    """The sentence with which a command line is refused."""

    def run(line):
        code, _, err = call(*line.split())
        assert code == 2
        return err

    return run


def test_without_rules_nothing_changes():
    plain = perfmodel.predict(**JOB, tp=4)
    assert plain.plan.rule_set == "megatron-sp"
    assert perfmodel.predict(**JOB, tp=4, rules="megatron-sp") == plain
    assert perfmodel.predict(**JOB, tp=4, sequence_parallel=False) == perfmodel.predict(**JOB, tp=4, rules="megatron")


def test_ulysses_exchanges_where_megatron_gathers():
    gathered, exchanged = (perfmodel.predict(**JOB, cp=8, rules=rules) for rules in ("megatron", "ulysses"))
    assert exchanged.parts["context_parallel_communication"] < gathered.parts["context_parallel_communication"]


def test_a_saved_plan_holds_user_defined_rules(mine, tmp_path, say):
    saved = tmp_path / "plan.yaml"
    say(f"predict {FLAGS} --tp 2 --rules {mine} --save {saved}")
    mine.unlink()
    plan = read_plan(saved)
    assert plan.rules.name == plan.rule_set == "mlp-only"
    assert yaml.safe_load(saved.read_text())["rules"] == yaml.safe_load(MLP_ONLY)
    again = perfmodel.predict(saved)
    mine.write_text(MLP_ONLY, encoding="utf-8")
    assert again.step_time == perfmodel.predict(**JOB, tp=2, rules=mine).step_time
    assert again.step_time != perfmodel.predict(**JOB, tp=2).step_time
    assert again.plan.hash() == plan.hash()


def test_old_plan_files_mean_the_same(tmp_path):
    path = tmp_path / "plan.yaml"
    perfmodel.write_plan(perfmodel.predict(**JOB, tp=2).plan, path)
    new = yaml.safe_load(path.read_text())
    assert (new["rules"], new["rule_set"], new["sequence_parallel"]) == ("megatron-sp", "megatron-sp", True)
    without = {key: value for key, value in new.items() if key not in ("rules", "rule_set", "sequence_parallel")}
    for keys, meant in [
        ({"rule_set": "megatron-sp", "sequence_parallel": True}, "megatron-sp"),
        ({"sequence_parallel": True}, "megatron-sp"),
        ({"sequence_parallel": False}, "megatron"),
        ({}, "megatron"),
        ({"rules": "megatron"}, "megatron"),
        ({"rule_set": "megatron-sp"}, "megatron-sp"),
    ]:
        assert plan_from_dict({**without, **keys}).rule_set == meant


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rules": "megatron", "rule_set": "megatron-sp"}, "rule_set='megatron-sp': rules=megatron say another"),
        ({"rules": "megatron", "sequence_parallel": True}, "sequence_parallel=true: the rules megatron do not cut"),
        ({"rule_set": "megatron-sp", "sequence_parallel": False}, "sequence_parallel=false: the rules megatron-sp cut"),
        ({"rules": "ulyses"}, "did you mean 'ulysses'"),
        ({"rules": {"rules": {"ffn": ["tpp"]}, "zero": 1}}, "2 faults"),
        ({"rules": ["ddp"]}, r"rules=\['ddp'\]: must be a name of a rule set"),
    ],
)
def test_a_plan_file_that_contradicts_itself(keys, says, tmp_path):
    path = tmp_path / "plan.yaml"
    perfmodel.write_plan(perfmodel.predict(**JOB, tp=2).plan, path)
    data = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in ("rules", "rule_set", "sequence_parallel")}
    with pytest.raises(InputError, match=says):
        plan_from_dict({**data, **keys})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("predict --tp 2 --rules megatron --sequence-parallel", "leave out one of the two, or use rules=megatron-sp"),
        ("search --rules megatron --rules ulysses --sequence-parallel", "leave out one of the two, or use rules=megatron-sp"),
        ("predict --rules megatron,ulysses", "a plan has one rule set"),
        ("predict --tp 2 --rules ulysses", "tp=2: the rule set ulysses cuts nothing by tp: its ranks would all do the same; use tp=1"),
        ("predict --cp 16 --rules ulysses", "cp=16: must divide num_key_value_heads=8; use 1, 2, 4 or 8"),
        ("predict --rules nothing.yaml", "rules=nothing.yaml: no such file"),
        (
            f"predict {TIED} --tp 2 --rules mlp-only.yaml",
            "token_embedding and lm_head need it in 2 layouts; cut vocab_in and vocab_out alike",
        ),
        ("search --cp 16 --rules ulysses", "cp=16: must divide num_key_value_heads=8"),
    ],
)
def test_what_is_refused(flags, says, refused, mine):
    verb, rest = flags.split(" ", 1)
    assert says in refused(f"{verb} {rest if '--model' in rest else f'{FLAGS} {rest}'}")


@pytest.mark.slow
def test_a_plan_file_with_other_rules(ask, tmp_path):
    plan = tmp_path / "plan.yaml"
    ask(f"predict {FLAGS} --cp 8 --save {plan}")
    now = ask(f"predict {plan} --rules ulysses")
    assert now["plan"]["rules"] == "ulysses"
    assert now["overridden"] == {"rules": {"plan": "megatron", "now": "ulysses", "follows": False}}
    back = ask(f"predict {plan} --no-sequence-parallel")
    assert (back["plan"]["rules"], "overridden" in back) == ("megatron", False)


# --- searched -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ulysses_is_found_where_it_is_better(say, ask, tmp_path):
    """One long sequence on each node: heads are exchanged within it, where keys and values of all of it would have to be gathered."""
    flags = "--model llama-2-7b --cluster dgx-h100 --chips 8 --global-batch 1 --seq-len 32k"
    usual = ask(f"search {flags} --rules megatron-sp")
    both = ask(f"search {flags} --rules megatron-sp --rules ulysses")
    assert both["plans"][0]["plan"]["rules"] == "ulysses"
    assert both["plans"][0]["step_time"] < usual["plans"][0]["step_time"]
    assert both["num_evaluated"] > usual["num_evaluated"]
    text = say(f"search {flags} --rules megatron-sp --rules ulysses --csv {tmp_path / 'plans.csv'}")
    assert " rules" in text
    assert ",rules," in (tmp_path / "plans.csv").read_text().splitlines()[0]


@pytest.mark.slow
def test_rules_in_python(mine):
    search = perfmodel.find_plans(**JOB, rules=["megatron", mine], top=3)
    assert {prediction.plan.rule_set for prediction in search.plans} <= {"megatron", "mlp-only"}
    one = perfmodel.find_plans(**JOB, rules=load_rule_set(mine), top=1)
    assert one.best.plan.rule_set == "mlp-only"


@pytest.mark.slow
def test_explain_asks_for_rules(say, tmp_path):
    plan = tmp_path / "plan.yaml"
    say(f"predict {FLAGS} --profile megatron --cp 8 --save {plan}")
    answer = " ".join(say(f"explain {plan} --why-not rules=ulysses,cp=8").split())
    assert answer.startswith("Why not rules=ulysses, cp=8: it would fit")
    assert "% faster" in answer
    say(f"predict {FLAGS} --profile megatron --cp 8 --rules ulysses --save {plan}")
    assert "rules=ulysses: the plan has that" in say(f"explain {plan} --why-not rules=ulysses")


SETS = ("ddp", "megatron", "megatron-sp", "ulysses")


@pytest.mark.parametrize("chips, batch, seq_len", [(8, 4, 96), (12, 6, 96)])
@pytest.mark.slow
def test_each_plan_is_under_one_rule_set(chips, batch, seq_len):
    """The first rule set counts where several give the same plan once axes of one rank are dropped: searched one at a time."""
    model = make_model(**LLAMA_LIKE | {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4})
    estimator = estimator_of(make_job(model, batch=batch, seq_len=seq_len), chips=chips, node=4)
    sets = tuple(load_rule_set(name) for name in SETS)
    alone = {}
    for rules in sets:
        state = sweep_all(estimator, Space(rules=(rules,)))
        for i in state.best.time.ids:
            plan = state.plan(int(i))
            axes = {"cp"} if plan.layout.cp > 1 else set()
            axes |= {"tp_kv", "tp_q"} if plan.layout.tp > 1 else set()
            alone.setdefault((*_knobs(plan), frozenset(rules.among(frozenset(axes)).items())), rules.name)
    together = sweep_all(estimator, Space(rules=sets))
    plans = [together.plan(int(i)) for i in together.best.time.ids]
    assert together.counts.num_evaluated == len(plans) == len(alone)
    assert sorted(plan.rule_set for plan in plans) == sorted(alone.values())
    assert len({plan.rule_set for plan in plans}) == len(SETS)


def test_a_row_under_any_rules_is_the_single_prediction():
    model = make_model(**LLAMA_LIKE | {"num_hidden_layers": 2, "num_key_value_heads": 4})
    estimator = estimator_of(make_job(model, batch=4, seq_len=96), chips=8, node=4)
    state = sweep_all(estimator, Space(rules=tuple(load_rule_set(name) for name in ("ulysses", "megatron-sp"))))
    for i, time, memory in list(zip(state.best.time.ids, state.best.time.values, state.best.time.companions, strict=True))[::7]:
        single = estimator.predict(state.plan(int(i)))
        assert (single.step_time, single.memory["total"]) == (time, memory)


def test_baselines_obey_the_rules():
    estimator = estimator_of(make_job(make_model(), batch=8), chips=8)
    result = search_plans(estimator, Space(rules=(load_rule_set("ulysses"),)))
    assert {prediction.plan.rule_set for baseline in result.baselines for prediction in baseline.plans} == {"ulysses"}


def test_a_framework_runs_its_own_rules_only(mine, ask):
    flags = f"{FLAGS} --profile megatron"
    prediction = ask(f"predict {flags} --tp 2 --rules {mine}")
    assert prediction["not_runnable_reason"].startswith("rules=mlp-only: megatron cuts operators as one of megatron, megatron-sp, ")
    assert prediction["not_executable_reason"] == ""
    only = ask(f"search {flags} --rules {mine} --only-runnable")
    assert {prediction["plan"]["layout"]["tp"] for prediction in only["plans"]} == {1}
    assert json.dumps(prediction["plan"]["rules"]["rules"]["ffn"]) == '["tp"]'


def _knobs(plan):
    return (plan.layout, plan.order, plan.zero, plan.micro_batch, plan.recompute, plan.schedule, plan.virtual_stages, plan.stage_layers)
