"""`python -m lab.pase`: the numbers of the paper next to those found here."""

import json

import pytest

from lab.pase.report import main


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def call_json(call):
    return lambda *arguments: json.loads(call(*arguments, "--json")[1])


def test_the_tables_are_shown_with_the_published_ones(call):
    code, out, _ = call("--graph", "alexnet", "--graph", "rnnlm", "--devices", "8,32")
    assert code == 0
    assert "9.70982965e+10" in out  # the reference optimum at p = 8
    assert "7.92 s" in out  # FlexFlow at p = 32
    assert "2 x fully connected" in out
    assert out.count("published") > 5


def test_json_holds_the_strategies(call_json):
    runs = call_json("--graph", "alexnet", "--devices", "32")["runs"]
    assert [run["cost_flops"] for run in runs] == [53136349552]
    assert runs[0]["is_proved"] is True
    assert runs[0]["times_data_parallel"] == pytest.approx(11.645, abs=0.0005)
    assert runs[0]["strategy"][10] == {"kind": "fully connected", "parts": {"b": 1, "n": 4, "c": 8}}


def test_data_parallelism_outside_the_space_is_null(call_json):
    assert call_json("--graph", "alexnet", "--devices", "64")["runs"][0]["times_data_parallel"] is None


@pytest.mark.slow
def test_figure_6_follows_the_tables(call, tmp_path):
    path = tmp_path / "figure.svg"
    code, out, _ = call("--graph", "alexnet", "--devices", "8,32", "--figure", "--plot", str(path))
    assert code == 0
    assert out.index("Table II") < out.index("Figure 6") < out.index("signs right") < out.index("p = 32: speedups")
    assert "3.51" in out  # measured on the 2080 Ti, p = 8
    assert path.exists()


def test_without_the_flag_there_is_no_figure(call, call_json):
    code, out, _ = call("--graph", "alexnet", "--devices", "8")
    assert code == 0
    assert "Figure 6" not in out
    assert "figure" not in call_json("--graph", "alexnet", "--devices", "8")


def test_json_holds_the_figure(call_json):
    figure = call_json("--graph", "alexnet", "--devices", "8", "--figure")["figure"]
    assert [(point["cluster"], point["strategy"]) for point in figure["points"]] == [
        ("pase-1080ti", "expert"),
        ("pase-1080ti", "PaSE"),
        ("pase-2080ti", "expert"),
        ("pase-2080ti", "PaSE"),
    ]
    assert figure["points"][3]["published_speedup"] == 4.0
    assert figure["signs"] == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--graph", "alexnett"], "graph=alexnett: no such layer graph is shipped; did you mean 'alexnet'"),
        (["--devices", "0"], "devices=0: must be a whole number of at least 1"),
        (["--graph", "resnet101", "--figure"], "graph=resnet101: is not in figure 6; use alexnet, inception3, rnnlm, transformer"),
        (["--devices", "12", "--figure"], "devices=12: is not in figure 6; use 4, 8, 16, 32, 64"),
        (["--plot", "figure.txt"], "plot=figure.txt: must end in .png, .svg or .pdf"),
        (["--devices", ""], "devices=: must name at least one number"),
    ],
)
def test_bad_input_is_one_sentence(call, flags, sentence):
    code, out, err = call(*flags)
    assert code == 2
    assert sentence in err
    assert out == ""
    assert err.count("\n") == 1
