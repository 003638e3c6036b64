"""`perfmodel report` from outside."""

import json
from html.parser import HTMLParser

import pytest

from tests.cli.test_configs import CASES

VOID = {"meta", "br", "path", "rect", "circle"}


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        assert not {"src", "srcset", "data"} & dict(attrs).keys()
        assert tag not in ("link", "img", "iframe", "object")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    page = Balanced()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return " ".join(page.text)


@pytest.mark.parametrize("plans", [["megatron-22b"], ["ddp", "fsdp"]])
def test_a_page_is_whole_and_has_the_numbers_of_predict(call, call_json, plans, tmp_path):
    report = call_json("report", *plans, "--out", "page.html")
    text = read(tmp_path / "page.html")
    assert report["num_bytes"] == (tmp_path / "page.html").stat().st_size < 1e6
    for plan in plans:
        predicted = call_json("predict", plan)
        assert f"{predicted['tokens_per_second_per_chip']:,.0f} tokens/s a chip" in text
    assert report["verdict"] in text


JOB = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", 8, "--global-batch", 16, "--seq-len", "1k"]


@pytest.mark.parametrize(
    "asked",
    [
        ("predict", *JOB),
        ("predict", *JOB, "--tp", "1,2"),
        ("search", *JOB),
        ("search", *JOB[:4], "--by", "10d", "--tokens", "1B", *JOB[6:]),
    ],
    ids=["one plan", "a comparison", "a search", "a cluster's size"],
)
@pytest.mark.slow
def test_predict_and_search_write_the_page_of_their_plans(call, tmp_path, asked):
    code, out, _ = call(*asked, "--report", "page.html")
    assert code == 0
    assert "page: page.html" in out
    assert "tokens/s a chip" in read(tmp_path / "page.html")


def test_names_are_escaped(call, tmp_path):
    assert call("predict", *JOB, "--save", "<b>&x.yaml")[0] == 0
    assert call("report", "<b>&x.yaml", "fsdp", "--out", "page.html")[0] == 0
    read(tmp_path / "page.html")
    assert "<b>&x" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("out", ["page.txt", "missing/page.html"])
def test_a_refused_report_leaves_nothing(call, out, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, printed, error = call("report", "ddp", "--out", out)
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert sorted(tmp_path.rglob("*")) == before


SEARCHED = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", "16", "--global-batch", "64", "--seq-len", "4k"]


@pytest.mark.slow
def test_a_saved_search_is_the_page_of_its_result(call, call_json, tmp_path):
    search = call_json("search", *SEARCHED, "--profile", "megatron")
    (tmp_path / "search.json").write_text(json.dumps(search), encoding="utf-8")
    page = call_json("report", "search.json", "--out", "page.html")
    assert "best plans" in [name.lower() for name in page["sections"]]
    text = read(tmp_path / "page.html")
    assert f"{search['num_evaluated']:,} plans evaluated" in text
    assert f"{search['plans'][0]['tokens_per_second_per_chip']:,.0f} tokens/s a chip" in text


def test_the_framework_of_a_page_may_be_another_one(call, tmp_path):
    pages = []
    for profile in ("torch-fsdp2", "deepspeed"):
        call("report", "fsdp", "--profile", profile, "--out", "page.html")
        pages.append(read(tmp_path / "page.html"))
    assert pages[0] != pages[1]
    assert "deepspeed" in pages[1]


@pytest.mark.slow
def test_a_configuration_has_a_page(call, tmp_path):
    config = CASES / "05-torchtitan-toml" / "launch.txt"
    code, _, _ = call("report", config, "--cluster", "dgx-h100", "--out", "page.html")
    assert code == 0
    assert "torchtitan" in read(tmp_path / "page.html")


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"plans": []}', '{"num_evaluated": 3}'])
def test_other_json_is_refused(call, tmp_path, text):
    (tmp_path / "search.json").write_text(text, encoding="utf-8")
    code, _, err = call("report", "search.json", "--out", "page.html")
    assert code == 2
    assert err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


SERVED = ["serve", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", 8, "--input-len", "1k", "--output-len", 256]
LOADED = [*SERVED, "--concurrency", 64, "--assume", "pue=1.1"]


@pytest.mark.parametrize(
    ("more", "sections"),
    [
        ((), ("where a decode step goes", "operators", "start")),
        (("--search", "--ttft", "1s", "--tpot", "20ms"), ("operators", "best plans", "start")),
        (("--workers", "1x4:1x4"), ("memory", "start")),
    ],
)
def test_a_service_has_a_page_with_the_numbers_of_serve(call_json, more, sections, tmp_path):
    service = call_json(*LOADED, *more, "--report", "page.html")
    best = service.get("best", service)
    text = read(tmp_path / "page.html")
    assert f"{best['tokens_per_second_per_chip']:,.0f} output tokens/s a chip" in text
    assert service["launch"][0]["command"] in text
    assert all(section in text.lower() for section in sections)
    assert "NVSwitch" in text  # the source of the network
    assert (tmp_path / "page.html").stat().st_size < 1e5
    again = call_json(*next(line for line in text.split("\n") if "perfmodel serve" in line).split()[1:])
    assert again["launch"] == service["launch"]


@pytest.mark.slow
def test_operators_of_a_searched_plan_are_in_its_format(call_json, tmp_path):
    service = call_json(*LOADED, "--search", "--allow", "bf16,fp8", "--report", "page.html")["best"]
    assert service["plan"]["quantization"] == "fp8"
    call_json(*LOADED, "--quantization", "fp8", "--tp", service["plan"]["tp"], "--report", "alone.html")
    searched, alone = (read(tmp_path / name).split("operator by operator: ")[1].split()[:2] for name in ("page.html", "alone.html"))
    assert searched == alone


def test_a_service_that_does_not_fit_has_a_page(call, tmp_path):
    assert call(*LOADED, "--model", "llama-3-70b", "--chips", 1, "--report", "page.html")[0] == 2
    code, _, error = call("serve", "--model", "llama-3-70b", *LOADED[3:5], "--chips", 1, *LOADED[7:], "--report", "page.html")
    assert (code, error) == (2, "")
    assert "--quantization w4a16" in read(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--report", "page.txt"), "must end in .html"),
        (("--report", "page.html", "--operators"), "leave --operators out"),
        (("--report", "page.html", "--run"), "--run"),
        (("--report", "page.html", "--tp", "1,2"), "one of each degree"),
    ],
)
def test_a_page_of_a_service_that_cannot_be(call, more, message, tmp_path):
    code, printed, error = call(*LOADED, *more)
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert message in error
    assert not list(tmp_path.glob("page*"))
