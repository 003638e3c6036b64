"""`perfmodel report` from outside."""

from html.parser import HTMLParser

import pytest

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
    found = call_json("report", *plans, "--out", "page.html")
    text = read(tmp_path / "page.html")
    assert found["num_bytes"] == (tmp_path / "page.html").stat().st_size < 1e6
    for plan in plans:
        predicted = call_json("predict", plan)
        assert f"{predicted['tokens_per_second_per_chip']:,.0f} tokens/s a chip" in text
    assert found["verdict"] in text


def test_names_are_escaped(call, tmp_path):
    job = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", 8, "--global-batch", 16, "--seq-len", "1k"]
    assert call("predict", *job, "--save", "<b>&x.yaml")[0] == 0
    assert call("report", "<b>&x.yaml", "fsdp", "--out", "page.html")[0] == 0
    read(tmp_path / "page.html")
    assert "<b>&x" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("out", ["page.txt", "missing/page.html"])
def test_a_refused_report_leaves_nothing(call, out, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, printed, error = call("report", "ddp", "--out", out)
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert sorted(tmp_path.rglob("*")) == before
