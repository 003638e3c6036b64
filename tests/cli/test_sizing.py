"""`perfmodel search --by --budget` and `--objective` of a whole run, as a user meets them."""

import csv
import io

import pytest

JOB = ("search", "--model", "gpt2", "--global-batch", "64", "--seq-len", "1k", "--profile", "megatron", "--tp", "1", "--pp", "1")
RUN = (*JOB, "--cluster", "dgx-h100,dgx-b200", "--chips", "8..32", "--tokens", "1T")


@pytest.mark.slow
def test_the_front_with_the_cheapest_in_time_and_the_fastest_in_the_budget(call, call_json, tmp_path):
    result = call_json(*RUN, "--by", "100d", "--budget", "100k")
    runs, front = result["runs"], result["front"]
    assert len(runs) == 6
    assert [case["run"]["wall_days"] for case in runs] == sorted(case["run"]["wall_days"] for case in runs)
    in_time = [case for case in runs if case["run"]["wall_days"] <= 100]
    assert runs[result["cheapest"]]["run"]["cost"] == min(case["run"]["cost"] for case in in_time)
    assert result["best"] == result["cheapest"]
    assert {result["cheapest"], result["fastest"]} <= set(front)
    figure, plan = tmp_path / "front.svg", tmp_path / "plan.yaml"
    code, out, _ = call(*RUN, "--by", "100d", "--budget", "100k", "--plot", str(figure), "--save", str(plan))
    assert code == 0
    assert "cheapest in 100 days" in out
    assert "fastest for 100,000 USD" in out
    assert "1T tokens" in out
    assert figure.read_text().startswith("<?xml")
    assert f"num_chips: {runs[result['best']]['chips']}" in plan.read_text()


def test_rows_have_the_run(call):
    code, out, _ = call(*RUN, "--by", "100d", "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(rows) == 6
    assert [row["front"] for row in rows].count("cheapest") == 1
    assert all(float(row["wall_days"]) > float(row["days"]) > 0 and float(row["cost"]) > 0 for row in rows)


def test_nothing_that_meets_is_exit_code_2_with_the_nearest(call, tmp_path):
    plan = tmp_path / "plan.yaml"
    code, out, error = call(*RUN, "--by", "1h", "--save", str(plan))
    assert code == 2
    assert "cheapest in 0.04167 days  none" in out
    assert error.startswith("perfmodel: none of 6 runs trains 1T tokens in 0.04167 days; the nearest is 32 chips of dgx-b200: ")
    assert not plan.exists()


@pytest.mark.slow
def test_a_search_by_cost_has_its_column_and_orders_the_clusters(call, call_json):
    code, out, _ = call(*RUN, "--objective", "cost")
    assert code == 0
    assert "run USD" in out
    values = [search["plans"][0]["objective_value"] for search in call_json(*RUN, "--objective", "cost")["searches"]]
    assert values == sorted(values)
    one = call_json(*JOB, "--cluster", "dgx-h100", "--chips", "8", "--tokens", "1T", "--objective", "energy")
    assert one["objective"] == "energy"
    assert one["plans"][0]["objective_value"] == pytest.approx(one["run"]["energy"])


@pytest.mark.parametrize(
    "more, sentence",
    [
        (("--budget", "2M"), "--budget: sizes a cluster for a whole run; give its tokens, as --tokens 15T"),
        (("--tokens", "1T", "--by", ""), "by=: must be a time above 0; write 30d"),
        (("--tokens", "1T", "--by", "30d", "--objective", "energy"), "--objective: does not go with --by"),
        (("--tokens", "1T", "--by", "30d", "--top", "3"), "--top: does not go with --by"),
        (("--tokens", "1T", "--by", "30d", "--interval"), "--interval: does not go with --by"),
        (("--objective", "energy"), "objective=energy: is of the whole run; give its tokens"),
    ],
)
def test_bad_input_is_one_sentence(call, more, sentence):
    code, _, error = call(*JOB, "--cluster", "dgx-h100", "--chips", "8", *more)
    assert code == 2
    assert error.count("\n") == 1
    assert sentence in error
