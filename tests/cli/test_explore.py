"""`perfmodel explore` and `perfmodel chip`: tables, figures, JSON and CSV, and what is refused."""

import pytest

JOB = ["--model", "llama-3-8b", "--chips", "8", "--global-batch", "64", "--seq-len", "4k", "--profile", "megatron"]
JOB += ["--pp", "1", "--cp", "1", "--recompute", "none"]


@pytest.mark.slow
def test_an_axis_is_a_table_a_csv_and_a_figure(call, call_json, tmp_path):
    words = ["explore", *JOB, "--cluster", "dgx-h100", "--tp", "2", "--vary", "chip.memory.bandwidth=2..8TB/s", "--shares"]
    code, out, _ = call(*words, "--points", "3", "--csv", "points.csv", "--plot", "points.png")
    assert code == 0
    header = next(line for line in out.splitlines() if "step time" in line)
    assert header.split()[-6:] == ["compute", "memory", "network", "other", "peak", "memory"]
    assert "saturates from the first value on: each further value gains under 10%" in call(*words, "--points", "8")[1]
    rows = (tmp_path / "points.csv").read_text().splitlines()
    assert rows[0].startswith("chip.memory.bandwidth,time,compute_share,memory_share,network_share,other_share")
    assert [float(row.split(",")[0]) for row in rows[1:]] == pytest.approx([2e12, 4e12, 8e12])
    assert (tmp_path / "points.png").stat().st_size > 10_000
    exploration = call_json(*words, "--points", "3")
    assert [point["chip.memory.bandwidth"] for point in exploration["points"]] == pytest.approx([2e12, 4e12, 8e12])


@pytest.mark.slow
def test_a_heat_map_and_curves_of_two_axes(call, tmp_path):
    words = ["explore", *JOB, "--chip", "a100-spec", "--tp", "2", "--plot", "two.svg", "--vary"]
    assert call(*words, "technology.logic=n7,n5", "--vary", "technology.memory=hbm2e,hbm3")[0] == 0
    assert call(*words, "chip.memory.bandwidth=1..4TB/s", "--vary", "chip.peak_flop_rate=x1..x4", "--points", "4")[0] == 0
    assert (tmp_path / "two.svg").stat().st_size > 10_000


def test_elasticities_and_the_tornado_chart(call, call_json, tmp_path):
    words = ["explore", *JOB, "--cluster", "dgx-h100", "--tp", "2", "--sensitivity"]
    _, out, _ = call(*words, "--plot", "tornado.png")
    assert "chip.peak_flop_rate" in out
    assert (tmp_path / "tornado.png").stat().st_size > 10_000
    assert call_json(*words)["elasticities"][0]["name"] == "chip.peak_flop_rate"


def test_the_way_from_one_system_to_another(call, call_json, tmp_path):
    words = ["explore", *JOB, "--from", "dgx-a100", "--to", "dgx-h100"]
    _, out, _ = call(*words, "--plot", "way.png")
    assert "memory capacity" in out
    assert "total" in out
    assert (tmp_path / "way.png").stat().st_size > 10_000
    assert len(call_json(*words)["rungs"]) == 6


def test_a_chip_from_technology_names_what_binds_it_and_can_be_used(call, call_json, tmp_path):
    _, out, _ = call("chip", "--from", "a100-spec", "--save", "made.yaml")
    assert "limited by                      power" in out
    assert call_json("chip", "--from", "a100-spec")["binding"] == "power"
    from_technology, direct = (
        call_json("predict", *JOB, "--tp", "2", "--chip", chip)["step_time"] for chip in (str(tmp_path / "made.yaml"), "a100-spec")
    )
    assert from_technology == direct


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["explore", *JOB, "--cluster", "dgx-h100"], "--vary, --sensitivity, --to: give one of them"),
        (["explore", *JOB, "--from", "dgx-a100", "--sensitivity"], "--to: is missing"),
        (["explore", *JOB, "--cluster", "dgx-h100", "--vary", "plan.tp=1", "--to-precision", "fp8"], "--to-precision: goes with --to"),
        (["explore", *JOB, "--cluster", "dgx-h100", "--vary", "chip.bandwidth=1TB/s"], "chip.bandwidth: is no axis; did you mean"),
        (["chip"], "--from: is missing"),
        (["chip", "--from", "a300"], "spec=a300: unknown specification; use one of a100-spec"),
    ],
)
def test_bad_input_is_one_sentence(call, words, sentence):
    code, _, err = call(*words)
    assert code == 2
    assert sentence in err


def test_steps_above_a_minute_are_in_seconds_as_in_predict(call):
    job = ("--model", "llama-3-70b", "--cluster", "dgx-h100", "--chips", 64, "--global-batch", 512, "--seq-len", "8k", "--pp", 2)
    _, out, _ = call("explore", *job, "--profile", "megatron", "--vary", "plan.tp=4,8")
    assert " min" not in out
