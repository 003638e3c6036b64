"""`perfmodel assumptions`, and what `--tokens` and `--assume` add to predict and search."""

JOB = ("--model", "gpt2", "--cluster", "dgx-h100", "--chips", "8", "--global-batch", "64", "--seq-len", "1k")


def test_the_constants_are_listed_with_their_sources(call, call_json):
    code, out, _ = call("assumptions", "--sources")
    assert code == 0
    assert "failures_per_node_day" in out
    assert "arXiv 2407.21783" in out
    assert all(assumption["source"] for assumption in call_json("assumptions")["assumptions"])


def test_tokens_add_the_whole_run(call, call_json):
    run = call_json("predict", *JOB, "--tokens", "1T")["run"]
    assert {"days", "goodput", "failures", "checkpoint_interval", "energy", "carbon", "cost"} <= set(run)
    assert run["days"] < run["wall_days"]
    assert "run" not in call_json("predict", *JOB)
    code, out, _ = call("predict", *JOB, "--tokens", "1T", "--assume", "price=5")
    assert code == 0
    assert "The whole run, 1T tokens" in out
    assert "at 5.00 USD a chip-hour" in out


def test_a_run_that_failures_undo_never_ends(call):
    code, out, _ = call("predict", *JOB, "--tokens", "1T", "--assume", "failures_per_node_day=1e6/day")
    assert code == 0
    assert "the run never ends: it loses more to failures than it trains" in out
    assert "inf" not in out


def test_a_search_has_the_run_of_its_best_plan(call_json):
    search = call_json("search", *JOB, "--profile", "megatron", "--tp", "1", "--pp", "1", "--tokens", "1T")
    assert search["run"]["days"] == search["plans"][0]["days"]


def test_step_times_do_not_use_the_constants(call_json):
    plain, changed = (call_json("predict", *JOB, *more) for more in ((), ("--tokens", "1T", "--assume", "restart_time=1e5")))
    assert plain["step_time"] == changed["step_time"]


def test_assumptions_need_tokens_and_values(call):
    code, _, error = call("predict", *JOB, "--assume", "pue=1.1")
    assert code == 2
    assert "--assume: is for the whole run; give its tokens, as --tokens 15T" in error
    code, _, error = call("predict", *JOB, "--tokens", "1T", "--assume", "pue")
    assert code == 2
    assert "write NAME=VALUE" in error
