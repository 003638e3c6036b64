"""A prediction of a service prints its summary, as text and in notebooks."""

import perfmodel

SERVICE = {"model": "llama-3-70b", "cluster": "dgx-h100", "input_len": 1024, "output_len": 256, "concurrency": 4}


def test_a_service_prints_its_summary():
    served = perfmodel.serve(**SERVICE, chips=4, tp=4)
    rows = dict(line.split("  ", 1) for line in str(served).splitlines())
    assert [*rows] == ["job", "plan", "times", "throughput", "memory", "based on"]
    assert rows["job"].strip() == "llama-3-70b in bf16, 1,024 tokens in, 256 out, 4 in flight, on 4 chips of dgx-h100"
    assert rows["memory"].endswith("usable on each chip: fits")
    assert repr(served) == str(served)
    assert served._repr_html_().count("<tr>") == len(rows)


def test_a_service_that_does_not_fit_prints_no_times():
    text = str(perfmodel.serve(**SERVICE, chips=1))
    assert "TTFT" not in text
    assert "usable on each chip: does not fit" in text
