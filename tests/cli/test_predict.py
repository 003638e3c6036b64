"""`perfmodel predict`: flags, JSON keys and sentences that programs rely on."""

import json
import math

import pytest

import perfmodel
from perfmodel.foundation.memory_headroom import DEFAULT_HEADROOM
from perfmodel.hardware.writer import save_cluster
from perfmodel.parallel.plan_file import plan_from_dict
from tests.cli.conftest import JOB, joined, with_flags

KEYS = {
    "schema_version", "step_time", "parts", "tokens_per_second_per_chip", "mfu_palm", "mfu_causal", "hfu", "peak_flop_rate", "memory",
    "fits", "plan", "rests_on",
}  # fmt: skip


def test_json_has_the_promised_keys(call_json):
    prediction = call_json("predict", *JOB, "--tp", 2, "--pp", 2, "--zero", 1)
    assert set(prediction) >= KEYS
    assert math.isclose(sum(prediction["parts"].values()), prediction["step_time"], rel_tol=1e-12)
    classes = {name: size for name, size in prediction["memory"].items() if name != "total"}
    assert math.isclose(sum(classes.values()), prediction["memory"]["total"], rel_tol=1e-12)
    assert prediction["fits"] is True
    assert set(prediction["rests_on"]) >= set(prediction["parts"])
    assert prediction["peak_flop_rate"] == pytest.approx(989.4e12, rel=1e-3)
    tokens = 512 * 8192 / prediction["step_time"] / 64
    assert prediction["tokens_per_second_per_chip"] == pytest.approx(tokens)


def test_the_plan_is_complete_with_every_default(call_json):
    plan = call_json("predict", *JOB)["plan"]
    assert plan_from_dict(plan).layout.dp_replicate == 64
    assert plan["layout"] == {"pp": 1, "dp_replicate": 64, "dp_shard": 1, "cp": 1, "tp": 1}
    assert (plan["micro_batch"], plan["recompute"], plan["zero"]) == (1, "none", 0)
    assert (plan["job"]["precision"], plan["job"]["optimizer"], plan["job"]["train"]) == ("bf16-mixed", "adamw", "full")
    assert (plan["profile"], plan["attention"], plan["calibration"], plan["cluster"]) == ("generic", "flash", "h100", "dgx-h100")


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ("", 0),
        ("--tp 8 --pp 8", 0),
        ("--zero 0", 0),
        ("--zero 1", 1),
        ("--dp-replicate 64", 0),
        ("--dp-shard 64", 3),
        ("--fsdp 64", 3),
        ("--profile megatron", 0),
    ],
)
def test_the_zero_stage_is_0_where_none_is_given_and_3_with_shards(call_json, flags, zero):
    assert call_json("predict", *JOB, *flags.split())["plan"]["zero"] == zero


def test_a_table_over_profiles_compares_one_plan(call_json):
    rows = call_json("predict", *JOB, "--tp", 2, "--profile", "generic,megatron,torch-fsdp2,deepspeed")["predictions"]
    plans = [{name: value for name, value in row["plan"].items() if name not in ("profile", "attention")} for row in rows]
    assert len(plans) == 4
    assert all(plan == plans[0] for plan in plans)


def test_adapters_are_named_and_counted(call, call_json):
    prediction = call_json("predict", *JOB, "--train", "lora:16:q_proj+v_proj")
    assert prediction["plan"]["job"]["train"] == "lora:16:q_proj+v_proj"
    assert prediction["num_parameters"] - prediction["num_trained_parameters"] == call_json("predict", *JOB)["num_parameters"]
    shown = joined(call("predict", *JOB, "--train", "qlora:16")[1])
    assert "adamw, qlora:16 (11.3M of 1.25B parameters trained)" in shown
    table = call("predict", *JOB, "--train", "full,lora:16")[1]
    rows = [line.split() for line in table.splitlines() if line]
    assert [row[0] for row in rows if row[0] in ("train", "full", "lora:16")] == ["train", "full", "lora:16"]


def test_the_rest_goes_to_dp_shard_under_zero(call_json):
    assert call_json("predict", *JOB, "--zero", 3, "--tp", 2)["plan"]["layout"]["dp_shard"] == 32


@pytest.mark.parametrize(
    ("flags", "knob", "value"),
    [
        ("--tp 4", "tp", 4),
        ("--pp 4", "pp", 4),
        ("--cp 2", "cp", 2),
        ("--dp-replicate 8 --dp-shard 8", "dp_shard", 8),
        ("--dp-replicate 32 --tp 2", "dp_replicate", 32),
        ("--micro-batch 4", "micro_batch", 4),
        ("--pp 2 --virtual-stages 4", "virtual_stages", 4),
        ("--pp 2 --schedule gpipe", "schedule", "gpipe"),
        ("--recompute selective", "recompute", "selective"),
        ("--tp 2 --no-sequence-parallel", "sequence_parallel", False),
        ("--tp 2 --sequence-parallel", "sequence_parallel", True),
        ("--attention unfused", "attention", "unfused"),
        ("--profile torch-fsdp2", "profile", "torch-fsdp2"),
        ("--calibration spec-sheet", "calibration", "spec-sheet"),
        ("--precision fp16-mixed", "precision", "fp16-mixed"),
        ("--optimizer sgd", "optimizer", "sgd"),
        ("--order tp-cp-pp-dp-shard-dp-replicate", "order", ["tp", "cp", "pp", "dp_shard", "dp_replicate"]),
    ],
)
def test_a_flag_is_in_the_plan(flags, knob, value, call_json):
    plan = call_json("predict", *JOB, *flags.split())["plan"]
    flat = {**plan, **plan["layout"], **plan["job"]}
    assert flat[knob] == value


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_predicted(call_json, call):
    job = ["--model", "gpt3-175b", "--cluster", "dgx-h100", "--chips", "8", "--global-batch", "8", "--seq-len", "2048"]
    prediction = call_json("predict", *job)
    assert prediction["fits"] is False
    assert prediction["step_time"] > 0
    code, out, _ = call("predict", *job)
    assert code == 0
    assert "DOES NOT FIT" in out


def test_it_fits_with_a_probability_and_memory_has_an_interval(call, call_json):
    prediction = call_json("predict", *JOB, "--tp", 2, "--pp", 2, "--zero", 1)
    low, high = prediction["memory_interval"]
    assert low < prediction["memory"]["total"] < high
    assert 0.9 < prediction["fits_probability"] <= 1.0
    assert call_json("predict", *JOB, "--tp", 2, "--pp", 2, "--zero", 1, "--profile", "megatron")["fits_probability"] > 0.9
    assert "probability of fitting over 99 %; 80 % interval" in call("predict", *JOB, "--tp", 2, "--pp", 2, "--zero", 1)[1]


def test_headroom_can_make_it_not_fit(call_json):
    prediction = call_json("predict", *JOB, "--tp", 2, "--pp", 2)
    share = prediction["memory"]["total"] / prediction["memory_usable"]
    assert call_json("predict", *JOB, "--tp", 2, "--pp", 2, "--memory-headroom", f"{100 * (1 - share) - 0.1}%")["fits"]
    tight = call_json("predict", *JOB, "--tp", 2, "--pp", 2, "--memory-headroom", f"{100 * (1 - share) + 0.1}%")
    assert (tight["fits"], tight["verdict"], tight["memory_spare"] > 0) == (False, "tight", True)


@pytest.mark.slow
def test_what_the_driver_keeps_is_not_memory_to_use(call, call_json):
    job = ["--model", "llama-3.1-8b", "--cluster", "aws-p4d", "--chips", 8, "--zero", 3, "--global-batch", 8, "--seq-len", 4096]
    prediction = call_json("predict", *job)
    total = prediction["memory"]["total"]
    assert prediction["memory_usable"] == 39.38 * 2**30 < prediction["memory_capacity"] == 40 * 2**30
    assert prediction["memory_spare"] == prediction["memory_usable"] - total
    assert prediction["fits"] == (total <= prediction["memory_usable"] * (1 - DEFAULT_HEADROOM))
    out = call("predict", *job)[1]
    assert "of 39.4 GiB usable" in out
    assert ("GiB to spare" in out) == (prediction["memory_spare"] >= 0)


def test_tokens_add_days_and_chip_hours(call_json):
    prediction = call_json("predict", *JOB, "--tp", 2, "--tokens", "15T")
    seconds = 15e12 / (512 * 8192) * prediction["step_time"]
    assert prediction["days"] == pytest.approx(seconds / 86400)
    assert prediction["chip_hours"] == pytest.approx(seconds * 64 / 3600)


def test_several_chips_and_clusters_are_one_object_and_one_table(call, call_json):
    flags = [*JOB[:2], *JOB[4:], "--cluster", "dgx-h100", "--cluster", "dgx-b200", "--chips", "64,128", "--tp", "2"]
    content = call_json("predict", *flags)
    assert [(prediction["plan"]["cluster"], prediction["plan"]["num_chips"]) for prediction in content["predictions"]] == [
        ("dgx-h100", 64),
        ("dgx-h100", 128),
        ("dgx-b200", 64),
        ("dgx-b200", 128),
    ]
    assert all(set(prediction) >= KEYS - {"schema_version"} for prediction in content["predictions"])
    code, out, err = call("predict", *flags)
    assert (code, err) == (0, "")
    assert len([line for line in out.splitlines() if line.startswith(("dgx-h100", "dgx-b200"))]) == 4


def test_one_bad_number_of_chips_leaves_the_others(call_json):
    content = call_json("predict", *JOB, "--chips", "64,100")
    assert len(content["predictions"]) == 1
    (failure,) = content["not_predicted"]
    assert failure["chips"] == 100
    assert "multiple of chips_per_node" in failure["reason"]


def test_a_saved_plan_predicts_the_same(call, call_json, tmp_path):
    direct = call_json("predict", *JOB, "--tp", 2, "--pp", 2, "--micro-batch", 2, "--save", tmp_path / "plan.yaml")
    again = call_json("predict", tmp_path / "plan.yaml")
    assert again == direct


@pytest.mark.parametrize("cluster", ["dgx-b200", "dgx-a100"])
def test_a_saved_plan_takes_no_calibration_to_other_chips(call_json, tmp_path, cluster):
    """Neither one that was merely the best known, nor one that an old file or a person pinned."""
    direct = call_json("predict", *JOB, "--tp", 2, "--cluster", cluster)["predictions"][1]
    for pinned in ([], ["--calibration", "h100"], ["--calibration", "spec-sheet"]):
        path = tmp_path / "plan.yaml"
        call_json("predict", *JOB, "--tp", 2, "--save", path, *pinned)
        moved = call_json("predict", path, "--cluster", cluster)
        assert moved["step_time"] == direct["step_time"]
        assert bool(moved["warnings"]) == bool(pinned)


def test_a_calibration_is_saved_where_it_was_asked_for_only(call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    call_json("predict", *JOB, "--save", path)
    assert "calibration" not in path.read_text()
    asked = call_json("predict", *JOB, "--calibration", "spec-sheet", "--save", path)
    assert "\ncalibration: spec-sheet\n" in path.read_text()
    assert call_json("predict", path) == asked


def test_zero_that_shards_nothing_is_refused_and_never_dropped(call, call_json):
    for zero in ("3", "1"):
        for verb in ("predict", "search"):
            code, out, err = call(verb, *JOB, "--dp-replicate", "64", "--zero", zero)
            assert (code, out) == (2, "")
            assert f"zero={zero}: shards over dp_shard (and cp), which is 1 with dp_replicate=64; give dp_shard=64" in err
    assert call_json("predict", *JOB, "--dp-replicate", "8", "--zero", "3")["plan"]["layout"]["dp_shard"] == 8
    assert call_json("predict", *JOB, "--dp-replicate", "32", "--cp", "2", "--zero", "1")["plan"]["zero"] == 1


def test_replicas_that_leave_chips_idle_are_refused(call, call_json):
    code, out, err = call("predict", *JOB, "--dp-replicate", "8")
    assert (code, out) == (2, "")
    assert "dp_replicate=8: with the other degrees it takes 8 of chips=64" in err
    assert call_json("search", *JOB, "--dp-replicate", "8", "--max-tp", 1, "--max-pp", 1, "--max-cp", 1)["num_evaluated"] > 0


def test_a_sequence_beyond_the_positions_of_the_model_is_noted(call, call_json):
    job = with_flags(JOB, "--model", "llama-3-8b")
    long = with_flags(job, "--seq-len", "16384", "--tp", "8")
    (warning,) = call_json("predict", *long)["warnings"]
    assert "seq_len=16384 is beyond the 8192 positions of llama-3-8b" in warning
    assert warning in joined(call("predict", *long)[1])
    assert call_json("predict", *job, "--tp", "8")["warnings"] == []


def test_flags_with_a_plan_override_it_and_are_named(call, call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    call_json("predict", *JOB, "--fsdp", 32, "--tp", 2, "--save", path)
    for flags in (
        ["--tp", 4, "--dp-shard", 16],
        ["--precision", "fp32", "--optimizer", "sgd"],
        ["--global-batch", 1024, "--seq-len", "4k"],
        ["--profile", "torchtitan", "--recompute", "full", "--micro-batch", 2],
    ):
        by_flags = call_json("predict", *with_flags(["--fsdp", "32", "--tp", "2", *JOB], *with_flags_of_fsdp(flags)))
        now = call_json("predict", path, *flags)
        assert now.pop("overridden")
        assert now == by_flags
    more = call_json("predict", path, "--chips", 128)
    assert more["plan"]["layout"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 2}
    assert more["overridden"] == {
        "chips": {"plan": 64, "now": 128, "follows": False},
        "dp_shard": {"plan": 32, "now": 64, "follows": True},
    }
    out = call("predict", path, "--chips", 128)[1]
    assert "overrides    chips 128 (the file: 64)\n             so that also dp_shard 64 (the file: 32)" in out
    assert "calibration spec-sheet (the file: none)" in call("predict", path, "--calibration", "spec-sheet")[1]


def test_modules_that_run_again_override_a_plan(call, call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    call_json("predict", *JOB, "--tp", 2, "--save", path)
    now = call_json("predict", path, "--recompute-modules", "mlp")
    assert now["overridden"] == {"recompute": {"plan": "none", "now": "selective", "follows": False}}
    del now["overridden"]
    assert now == call_json("predict", *JOB, "--tp", 2, "--recompute-modules", "mlp")


def with_flags_of_fsdp(flags):
    """`--dp-shard` of a plan with ZeRO 3, as flags have it."""
    return ["--fsdp" if flag == "--dp-shard" else flag for flag in flags]


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("--dp 64", (64, 1, 0)),
        ("--dp 64 --zero 0", (64, 1, 0)),
        ("--dp 64 --profile megatron", (64, 1, 0)),
        ("--dp 32 --tp 2 --zero 1", (1, 32, 1)),
        ("--dp 64 --dp-shard 8", (8, 8, 3)),
        ("--fsdp 64", (1, 64, 3)),
        ("--fsdp 8", (8, 8, 3)),
    ],
)
def test_dp_and_fsdp_are_the_degrees_that_people_mean(flags, layout, call, call_json):
    plan = call_json("predict", *JOB, *flags.split())["plan"]
    assert (plan["layout"]["dp_replicate"], plan["layout"]["dp_shard"], plan["zero"]) == layout
    assert "must equal chips=64" in call("predict", *JOB, "--dp", "8")[2]
    assert "is dp_shard=8 with zero=3" in call("predict", *JOB, "--fsdp", "8", "--zero", "1")[2]


def test_flags_as_people_type_them(call_json):
    known = call_json("predict", *JOB, "--tp", 2, "--micro-batch", 2, "--tokens", "15T")
    typed = ["--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--nodes", "8", "--batch-tokens", "4M", "--seq", "8k", "--mbs", "2"]
    assert call_json("predict", *typed, "--tp", 2, "--tokens", "15t") == known
    assert (
        call_json("predict", *with_flags(JOB, "--chips", ""), "--gpus", "64", "--gbs", "512", "--tp", 2, "--mbs", 2, "--tokens", "15T")
        == known
    )


def test_tokens_that_are_no_whole_sequences_are_refused(call):
    typed = [*JOB[:6], "--batch-tokens", "4000000", "--seq-len", "8192"]
    code, _, err = call("predict", *typed)
    assert code == 2
    assert "batch_tokens=4000000: must be whole sequences of seq_len=8192 tokens; use 3997696 or 4005888" in err


def test_flags_of_other_tools_are_named_as_they_are_here(call):
    code, _, err = call("predict", *JOB, "--batch-size", "8")
    assert code == 2
    assert "No such option: --batch-size (here it is --global-batch or --micro-batch or --batch-tokens)" in err
    assert "(here it is --batch)" in call("shard", "alexnet", "--batch-size", "8")[2]
    assert "(here it is --train lora:RANK)" in call("predict", *JOB, "--lora-rank", "8")[2]


def test_a_batch_of_millions_is_one_of_tokens(call):
    code, _, err = call("predict", *with_flags(JOB, "--global-batch", "4M"))
    assert code == 2
    assert "--global-batch=4M: counts sequences" in err
    assert "--batch-tokens 4M" in err
    assert "(or its tokens as --batch-tokens)" in call("predict", "--model", "gpt2", "--cluster", "dgx-h100")[2]


@pytest.mark.parametrize(("profile", "default"), [("unsloth", "full"), ("llama-factory", "full"), ("hf-trainer", "none")])
def test_recomputation_is_the_documented_default_of_the_trainer(profile, default, call_json):
    job = f"--model llama-3-8b --cluster dgx-h100 --chips 1 --gbs 8 --seq 2k --train lora:16 --profile {profile}"
    prediction, none = call_json("predict", *job.split()), call_json("predict", *job.split(), "--recompute", "none")
    assert prediction["plan"]["recompute"] == default
    assert any("recompute=full: not given" in note for note in prediction["warnings"]) is (default == "full")
    assert none["plan"]["recompute"] == "none"


def test_several_values_of_anything_are_one_table(call, call_json):
    flags = ["--seq-len", "4k,8k", "--profile", "megatron", "--profile", "torchtitan", "--fsdp", "64"]
    content = call_json("predict", *with_flags(JOB, *flags))
    assert [(prediction["plan"]["job"]["seq_len"], prediction["plan"]["profile"]) for prediction in content["predictions"]] == [
        (4096, "megatron"),
        (4096, "torchtitan"),
        (8192, "megatron"),
        (8192, "torchtitan"),
    ]
    out = call("predict", *with_flags(JOB, *flags))[1]
    header = next(line for line in out.splitlines() if line.strip().startswith("seq"))
    assert header.split()[:2] == ["seq", "framework"]
    assert out.startswith("llama-3.2-1b (1.24B parameters), 512 sequences a step, bf16-mixed, adamw, 64 chips of dgx-h100\n")
    assert {
        prediction["plan"]["job"]["model"]["name"] for prediction in call_json("predict", *JOB, "--model", "llama-3.2-3b")["predictions"]
    } == {
        "llama-3.2-1b",
        "llama-3.2-3b",
    }


def test_several_values_of_knobs_are_one_table(call, call_json):
    flags = ("--tp", "1,2", "--micro-batch", "1", "--micro-batch", "2", "--recompute", "none,full")
    result = call_json("predict", *JOB, *flags)
    knobs = [
        (prediction["plan"]["layout"]["tp"], prediction["plan"]["micro_batch"], prediction["plan"]["recompute"])
        for prediction in result["predictions"]
    ]
    assert len(set(knobs)) == len(knobs) == 8
    single = call_json("predict", *JOB, "--tp", 2, "--micro-batch", 2, "--recompute", "full")
    assert {name: single[name] for name in result["predictions"][0]} in result["predictions"]
    out = call("predict", *JOB, *flags)[1]
    assert "micro batch  recompute" in out
    job = dict(model="llama-3.2-1b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192)
    assert len(perfmodel.predict(**job, tp=[1, 2], recompute="full")) == 2


def test_several_rates_between_nodes_are_one_table(call_json):
    job = [word for word in JOB if word not in ("--cluster", "dgx-h100")]
    result = call_json("predict", *job, "--chip", "h100-sxm-80gb", "--scale-out", "100Gbit/s,400Gbit/s", "--zero", 1)
    slow, fast = (prediction["step_time"] for prediction in result["predictions"])
    assert slow > fast


@pytest.mark.parametrize(("text", "lengths"), [("4,096", None), ("131,072", None), ("4, 096", 2), ("2048,4096", 2), ("64,128", 2)])
def test_a_comma_that_may_part_thousands_is_asked_about(text, lengths, call):
    code, out, err = call("predict", *with_flags(JOB, "--seq-len", text), "--json")
    if lengths is None:
        assert code == 2
        assert f"write {text.replace(',', '')}, or '{text.replace(',', ', ')}' with spaces" in err
    else:
        assert len(json.loads(out)["predictions"]) == lengths


def test_a_table_as_csv(call, tmp_path):
    import csv

    code, out, err = call("predict", *with_flags(JOB, "--chips", "64,100"), "--tp", 2, "--zero", 1, "--csv", "-")
    assert (code, err) == (0, "")
    first, second = csv.DictReader(out.splitlines())
    assert (first["chips"], first["tp"], first["fits"], first["reason"]) == ("64", "2", "true", "")
    parts = [float(value) for name, value in first.items() if name.startswith("time_")]
    assert math.isclose(sum(parts), float(first["step_time"]), rel_tol=1e-9)
    assert (second["chips"], second["step_time"]) == ("100", "")
    assert "multiple of chips_per_node" in second["reason"]
    assert call("predict", *JOB, "--tp", 2, "--csv", "a.csv")[0] == 0
    assert (tmp_path / "a.csv").read_text().startswith("model,cluster,chips,")


def test_all_that_is_missing_is_named_at_once(call):
    code, out, err = call("predict")
    assert (code, out) == (2, "")
    for flag in ("--model", "--cluster", "--chips", "--global-batch", "--seq-len"):
        assert f"{flag}: is missing" in err


def test_what_does_nothing_is_noted(call_json):
    (note,) = call_json("predict", *JOB, "--schedule", "gpipe")["warnings"]
    assert note == "schedule=gpipe does nothing without a pipeline (pp=1)"
    (note,) = call_json("predict", *with_flags(JOB, "--chips", 8), "--tp", 8, "--zero", 1)["warnings"]
    assert note.startswith("zero=1 does nothing")


def test_times_of_one_output_have_one_unit(call):
    out = call("predict", *JOB, "--tp", 2)[1]
    lines = out[out.index("Where the step goes") : out.index("Memory of")].splitlines()[3:-1]
    assert {line.split("%")[0].split()[-2] for line in lines if line} == {"s"}


def test_tflops_are_model_flops_of_one_chip(call_json):
    prediction = call_json("predict", *JOB, "--tp", 2)
    assert prediction["tflops_per_chip"] == pytest.approx(prediction["mfu_palm"] * prediction["peak_flop_rate"] / 1e12)
    assert "PaLM" in prediction["flop_convention"]


def test_localhost_is_predicted_with_its_own_profile(call_json):
    flags = ["--model", "gpt2", "--cluster", "localhost", "--chips", "2", "--global-batch", "4", "--seq-len", "128", "--precision", "fp32"]
    assert call_json("predict", *flags)["plan"]["profile"] == "torch-gloo"


@pytest.mark.parametrize("cluster, profile", [("mi300x", "megatron-rocm"), ("tpu-v5p", "xla"), ("gaudi3", "xla"), ("h20", "generic")])
def test_no_chip_gets_host_constants_of_another_vendors_software(call_json, cluster, profile):
    flags = ["--model", "llama-3-8b", "--cluster", cluster, "--chips", 8, "--global-batch", 8, "--seq-len", 256, "--tp", 8]
    prediction = call_json("predict", *flags)
    assert prediction["plan"]["profile"] == profile
    assert (prediction["parts"]["host"] > 0) == (profile != "xla")
    as_megatron = call_json("predict", *flags, "--profile", "megatron")
    assert prediction["parts"]["host"] <= as_megatron["parts"]["host"]


def test_a_framework_that_is_assumed_for_a_chip_is_called_so(call):
    flags = ["predict", "--model", "gpt2", "--cluster", "mi300x", "--chips", 8, "--global-batch", 8, "--seq-len", 256]
    note = "profile=megatron-rocm: not given, so assumed for mi300x-192gb"
    assumed, named = (" ".join("".join(call(*flags, *more)[1:]).split()) for more in ((), ("--profile", "megatron-rocm")))
    assert note in assumed
    assert note not in named


def test_a_calibration_of_the_user_comes_first(call_json, home):
    from dataclasses import replace

    from perfmodel.hardware.writer import save_calibration

    folder = home / ".local/share/perfmodel/calibrations"
    folder.mkdir(parents=True)
    h100 = perfmodel.load_calibration("h100")
    mine = replace(h100, name="mine", sustained=replace(h100.sustained, sustained_clock_fraction=0.34))
    before = call_json("predict", *JOB, "--tp", 2)
    save_calibration(mine, folder / "mine.yaml")
    after = call_json("predict", *JOB, "--tp", 2)
    assert after["rests_on"]["forward"] == "calibrated: mine"
    assert after["step_time"] > before["step_time"]
    assert call_json("predict", *JOB, "--tp", 2, "--calibration", "h100")["step_time"] == before["step_time"]


PRIOR_JOB = [*JOB[:2], "--cluster", "pcie-workstation", "--chips", "4", "--global-batch", "4", "--seq-len", "1024"]


def test_a_plan_of_a_chip_with_a_prior_is_predicted_again(call_json, tmp_path):
    direct = call_json("predict", *PRIOR_JOB, "--save", tmp_path / "plan.yaml")
    assert direct["rests_on"]["forward"] == "prior: mean of h100 and b200"
    assert direct["plan"]["calibration"] == "prior"
    assert call_json("predict", tmp_path / "plan.yaml") == direct


def test_a_prior_where_no_chip_of_the_vendor_is_measured_is_refused(call):
    code, out, err = call("predict", *JOB[:2], "--cluster", "tpu-v5p", *JOB[4:], "--calibration", "prior")
    assert (code, out) == (2, "")
    assert "no chip like tpu-v5p of its maker is measured; use spec-sheet" in err


def test_the_text_has_units_and_the_basis_of_the_numbers(call):
    code, out, err = call("predict", *JOB, "--tp", 2, "--pp", 2, "--tokens", "15T")
    assert (code, err) == (0, "")
    for piece in (
        "step time",
        "MFU",
        "of 989 TFLOP/s dense bf16",
        "GiB",
        "calibrated: h100",
        "pipeline bubble",
        "chip-hours",
        "100 %",
    ):
        assert piece in joined(out)
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    assert "attention below the diagonal only" in joined(call("predict", *JOB, "--tp", 2, "--verbose")[1])


CHIP = ["--chip", "h20", "--per-node", "4", "--scale-up", "200GB/s", "--scale-out", "100Gbit/s"]


@pytest.mark.slow
def test_any_chip_is_a_cluster_and_its_plan_is_predicted_again(call, call_json, tmp_path):
    job = [*JOB[:2], *JOB[4:]]
    prediction = call_json("predict", *job, *CHIP, "--tp", 4, "--save", "plan.yaml")
    assert prediction["plan"]["cluster"] == "h20-96gb per-node=4 scale-up=200 GB/s scale-out=100 Gbit/s"
    assert call_json("predict", "plan.yaml")["step_time"] == prediction["step_time"]
    assert call_json("predict", *job, "--cluster", "h20", "--tp", 4)["step_time"] < prediction["step_time"]
    best = call_json("search", *job, *CHIP, "--top", 1)["plans"][0]
    assert best["plan"]["cluster"] == prediction["plan"]["cluster"]
    for verb in ("predict", "search"):
        code, _, err = call(verb, *JOB, *CHIP[2:])
        assert (code, err) == (2, "perfmodel: --per-node: goes with --chip NAME, in place of --cluster; see `perfmodel chips`\n")
    code, _, err = call("predict", *job, "--cluster", "h100")
    assert code == 2
    assert "give one of them, or a cluster: dgx-h100" in err


def test_a_cluster_file_gives_the_number_of_chips_where_it_is_not_set(call_json):
    save_cluster(perfmodel.load_cluster("dgx-h100", num_chips=16), "mine.yaml")
    prediction = call_json("predict", *JOB[:2], "--cluster", "./mine.yaml", *JOB[6:], "--tp", 8)
    assert prediction["plan"]["num_chips"] == 16
    assert prediction["warnings"] == ["chips=16: not given, so taken from the file of dgx-h100"]


@pytest.mark.slow
def test_chips_of_one_table_share_the_framework_and_unmeasured_ones_show_an_interval(call, call_json):
    job = [*JOB[:2], *JOB[4:], "--tp", 8, "--zero", 1]
    clusters = ["--cluster", "dgx-h100", "--cluster", "mi300x"]
    rows = call_json("predict", *job, *clusters)["predictions"]
    assert {row["plan"]["profile"] for row in rows} == {"generic"}
    assert all(row["interval"]["coverage"] == 0.8 for row in rows)
    assert "80% interval" in call("predict", *job, *clusters)[1]
    assert "80% interval" in call("search", *job, "--max-pp", 1, *clusters)[1]
    assert call_json("predict", *job, "--cluster", "mi300x")["plan"]["profile"] == "megatron-rocm"


def test_measured_chips_show_an_interval_only_where_it_is_asked_for(call):
    job = [*JOB[:2], *JOB[4:], "--tp", 8, "--zero", 1]
    assert "80% interval" not in call("predict", *job, "--cluster", "dgx-h100", "--cluster", "dgx-a100")[1]
    assert "80% interval" in call("predict", *job, "--cluster", "dgx-h100", "--cluster", "h20")[1]


def test_a_left_out_vision_tower_is_reported(call, call_json, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llava", "text_config": {**sizes, "vocab_size": 128, "max_position_embeddings": 512}, "vision_config": sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    job = ("--model", tmp_path / "config.json", "--cluster", "dgx-h100", "--chips", 8, "--global-batch", 8, "--seq-len", 512)
    code, out, _ = call("predict", *job)
    assert code == 0
    assert "parameters, without its vision tower), 8 sequences" in joined(out)
    (warning,) = call_json("predict", *job)["warnings"]
    assert "its vision tower is left out; only the 78,144 parameters of its language model are counted" in warning
    code, out, _ = call("search", *job)
    assert code == 0
    assert "without its vision tower" in joined(out)


def test_selective_recomputation_that_saves_nothing_says_so(call_json):
    flash = call_json("predict", *JOB, "--recompute", "selective")
    assert any("saves next to nothing with flash attention" in text for text in flash["warnings"])
    unfused = call_json("predict", *JOB, "--recompute", "selective", "--attention", "unfused")
    assert not any("selective" in text for text in unfused["warnings"])


def test_a_plan_that_the_framework_cannot_run_says_so(call, call_json):
    prediction = call_json("predict", *JOB, "--dp-shard", "64", "--profile", "megatron")
    assert (prediction["runnable"], prediction["not_runnable_reason"]) == (False, "zero=3: megatron has ZeRO 0 and 1 only")
    _, out, _ = call("predict", *JOB, "--dp-shard", "64", "--profile", "megatron")
    assert "not a plan for this framework: zero=3" in out
    assert call_json("predict", *JOB, "--dp-shard", "64", "--profile", "torchtitan")["runnable"]


@pytest.mark.parametrize("verb", ["predict", "search", "limits", "explain", "compare", "shard"])
def test_every_verb_that_takes_a_framework_takes_what_is_known_of_its_setup(call, verb):
    asked = {"explain": ("fsdp",), "compare": ("fsdp", "fsdp"), "shard": ("alexnet", "--cluster", "dgx-h100", "--chips", 8)}.get(verb, JOB)
    code, out, err = call(verb, *asked, "--setting", "compil")
    assert (code, out) == (2, "")
    assert err.startswith("perfmodel: setting=compil: is not known; did you mean 'compile'")
    assert "--setting NAME[=VALUE]" in call(verb, "--help")[1]


def test_weight_gradients_are_delayed_with_overlapped_exchanges_alone(call, call_json):
    asked = ("--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--chips", "64", "--global-batch", "256", "--seq-len", "4096")
    plan = ("--profile", "megatron", "--pp", "4", "--ep", "8", "--zero", "1", "--setting", "delayed_weight_gradients")
    code, out, err = call("predict", *asked, *plan)
    assert (code, out) == (2, "")
    assert "setting delayed_weight_gradients=true: needs moe_overlap" in err
    assert err.strip().endswith("state moe_overlap too")
    prediction = call_json("predict", *asked, *plan, "--setting", "moe_overlap", "--save", "late.yaml")
    assert prediction["plan"]["settings"] == {"moe_overlap": True, "delayed_weight_gradients": True}
    assert not prediction["warnings"]
    assert "delayed_weight_gradients" in call("search", *asked, *plan, "--setting", "moe_overlap", "--top", "1")[1]
    assert call_json("predict", "late.yaml")["step_time"] == prediction["step_time"]


def test_settings_are_repeatable_and_override_those_of_a_file(call, call_json, tmp_path):
    first = call_json("predict", *JOB, "--setting", "compile", "--setting", "attention_kernel=flash2", "--save", "plan.yaml")
    assert first["plan"]["settings"] == {"compile": True, "attention_kernel": "flash2"}
    assert call_json("predict", "plan.yaml") == first
    assert call_json("predict", *JOB, "--profile", "generic+compile+attention_kernel=flash2") == first
    assert "overrides settings compile+attention_kernel=flash3 (the file: compile+attention_kernel=flash2)" in joined(
        call("predict", "plan.yaml", "--setting", "attention_kernel=flash3")[1]
    )
    both = call_json("predict", *JOB, "--profile", "generic,torchtitan", "--setting", "compile")["predictions"]
    assert [prediction["plan"]["profile"] for prediction in both] == ["generic", "torchtitan"]
    assert all(prediction["plan"]["settings"] == {"compile": True} for prediction in both)


def test_tokens_give_the_price_of_the_chip_hours(call, call_json):
    job = [*JOB, "--tp", 8, "--tokens", "15T"]
    result = call_json("predict", *job)
    price = perfmodel.load_cluster("dgx-h100", num_chips=8).chip.price_per_hour
    assert result["cost"] == pytest.approx(result["chip_hours"] * price)
    assert result["run"]["cost"] == pytest.approx(result["run"]["chip_hours"] * price)
    assert f"{result['run']['cost']:,.0f} USD at {price:.2f} USD a chip-hour" in call("predict", *job)[1]


def test_an_unasked_interval_comes_without_a_table_of_parameters(call):
    job = [*JOB[:2], *JOB[4:], "--tp", 8, "--zero", 1]
    assert "10% larger" not in call("predict", *job, "--cluster", "mi300x")[1]
    assert "10% larger" in call("predict", *job, "--cluster", "mi300x", "--interval")[1]


def test_a_table_names_the_plans_that_the_framework_cannot_run(call):
    words = "--model qwen2.5-7b --cluster dgx-h100 --chips 8 --gbs 8 --seq 8k --zero 3 --profile llama-factory --cp 1,2"
    notes = [note for note in " ".join(call("predict", *words.split())[1].split()).split("note: ") if note.startswith("not a plan")]
    assert [note.strip() for note in notes] == [
        "not a plan for this framework: cp=2: llama-factory has no cp (dp_shard 4, cp 2, ZeRO 3, recompute full)"
    ]


def test_the_title_of_several_models_counts_the_trained_parameters_of_none(call):
    words = "--model qwen2.5-0.5b,llama-3.2-1b --chip a100-sxm-80gb --chips 1 --gbs 1 --seq 1k --train lora:16"
    out = call("predict", *words.split())[1]
    assert out.startswith("1 sequence a step, 1,024 tokens a sequence, bf16-mixed, adamw, lora:16, generic as the framework")


def test_a_table_says_why_models_do_not_fit_and_where_all_of_them_run(call):
    job = "--chip h100-nvl-94gb --chips 1 --gbs 1 --seq 128k --train lora:16 --profile hf-trainer"
    out = joined(call("predict", "--model", "qwen2.5-0.5b,llama-3.2-1b", *job.split())[1])
    assert "hf-trainer as the framework, 1 chip of h100-nvl-94gb" in out
    assert "qwen2.5-0.5b: memory peaks at the loss: 131,072 tokens by a vocabulary of 151,936" in out
    assert "tokens/s/chip" in out
