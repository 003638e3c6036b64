"""The endpoints of `perfmodel web`, without a browser."""

import json
import socket
import time

import pytest

from perfmodel.cli import app
from perfmodel.web.endpoints import MOST_BYTES, page
from tests.web.conftest import JOB

SMALL = {**JOB, "model": "gpt2", "seq_len": "1k"}
FLAGS = [word for name, value in JOB.items() for word in (f"--{name.replace('_', '-')}", str(value))]
CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }
)
TRAINER = """
model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_length: 4096
bf16: true
"""


def printed(capfd, *arguments):
    assert app.run([*arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_predict_is_that_of_the_command_line(post, capfd):
    assert post("predict", JOB) == (200, printed(capfd, "predict", *FLAGS))


@pytest.mark.slow
def test_explain_has_the_neighbours_of_the_command_line(post, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed(capfd, "predict", *FLAGS, "--save", "plan.yaml")
    assert post("explain", JOB) == (200, printed(capfd, "explain", "plan.yaml"))


@pytest.mark.slow
def test_search_is_that_of_the_command_line(post, capfd):
    job = {name: value for name, value in SMALL.items() if name not in ("tp", "zero")} | {"top": 3}
    status, result = post("search", job)
    flags = [word for name, value in job.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    expected = printed(capfd, "search", *flags)
    assert status == 200
    assert result | {"search_time": 0} == expected | {"search_time": 0}


def test_a_plan_that_does_not_fit_gets_the_changes_of_the_command_line(post, capfd):
    job, flags = JOB | {"zero": 0}, [*FLAGS[:-1], "0"]
    expected = printed(capfd, "predict", *flags)
    assert expected["remedies"]
    assert post("predict", {**job, "remedies": True}) == (200, expected)
    assert "remedies" not in post("predict", job)[1]


@pytest.mark.slow
def test_search_prints_its_progress_by_the_line(send):
    data = json.dumps(SMALL)
    accept = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
    status, headers, content = send("POST", "/api/search", data, **accept)
    *shares, last = map(json.loads, content.splitlines())
    assert (status, headers["Content-Type"]) == (200, "application/x-ndjson")
    assert [line["progress"] for line in shares] == sorted(line["progress"] for line in shares)
    assert last["answer"]["plans"]
    assert send("POST", "/api/search", json.dumps({**JOB, "tp": 7}), **accept)[0] == 400


@pytest.mark.slow
def test_a_search_whose_client_left_ends(server, post):
    data = json.dumps({**JOB, "model": "deepseek-v3", "chips": 1024, "global_batch": 8192}).encode()  # seconds of work
    before = server.worker._process.pid
    with socket.create_connection(server.server_address) as client:
        head = f"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        time.sleep(0.5)
    assert post("search", SMALL)[0] == 200
    assert server.worker._process.pid != before


def test_a_pasted_model_and_a_pasted_config_are_read(post):
    job = {name: value for name, value in JOB.items() if name != "model"}
    status, result = post("predict", {**job, "config": CONFIG})
    assert (status, result["plan"]["job"]["model"]["hidden_size"]) == (200, 1024)
    status, result = post("predict", {"cluster": "dgx-h100", "chips": 8, "config": TRAINER})
    assert (status, result["plan"]["micro_batch"], result["plan"]["job"]["global_batch"]) == (200, 2, 64)
    assert result["config"]["read"]
    status, changed = post("predict", {"cluster": "dgx-h100", "chips": 8, "config": TRAINER, "micro_batch": 1})
    assert (status, changed["plan"]["micro_batch"]) == (200, 1)


def test_a_pasted_plan_is_predicted_as_its_file(post, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = printed(capfd, "predict", *FLAGS, "--save", "plan.yaml")
    status, result = post("predict", {"config": (tmp_path / "plan.yaml").read_text()})
    assert (status, result["step_time"], result["plan_hash"]) == (200, expected["step_time"], expected["plan_hash"])


def test_nothing_that_is_pasted_is_executed(post, tmp_path):
    trap = tmp_path / "trap"
    for text in (
        f"import os\nos.system('touch {trap}')\ndef config():\n    return os.system('touch {trap}')\n",
        f"#!/bin/bash\ntouch {trap}\n$(touch {trap})\ntorchrun --nproc_per_node 8 train.py --x `touch {trap}`\n",
        f"!!python/object/apply:os.system ['touch {trap}']\n",
        f"a: !!python/object/apply:os.system ['touch {trap}']\n",
    ):
        status, result = post("predict", {**JOB, "config": text})
        assert status == 400
        assert "\n" not in result["message"]
    assert not trap.exists()


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        ({**JOB, "model": "llama-3-8x"}, "model", "did you mean"),
        ({**JOB, "tp": 6}, "tp", "must divide"),
        ({**JOB, "tp": "many"}, "tp", "whole number"),
        ({**JOB, "chips": -1}, "chips", ""),
        ({**JOB, "chips": "8,16"}, "chips", "one value"),
        ({**JOB, "chips": [8, 16]}, "chips", "a text, a number"),
        ({**JOB, "seq_len": 1e999}, "seq_len", ""),
        ({**JOB, "model": "/etc/passwd"}, "model", "a file"),
        ({**JOB, "model": "."}, "model", "a file"),
        ({**JOB, "cluster": "/etc/hosts per-node=8"}, "cluster", "a file"),
        ({**JOB, "model": "x" * 500}, "model", "longer than"),
        ({**JOB, "tpp": 2}, "tpp", "did you mean"),
        ({**JOB, "config": 3}, "config", "text"),
        ({**JOB, "config": "gibberish"}, "config", ""),
        ({**JOB, "config": CONFIG}, "model", "leave out one"),
        ({"chips": 8}, "model", "is missing"),
        ([], None, "must be a JSON object"),
        ("{", None, "not JSON"),
        ("[" * 5000, None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
    ],
)
def test_nonsense_is_one_sentence(post, data, field, words):
    status, result = post("predict", data)
    assert status == 400
    assert set(result) == {"code", "field", "value", "message", "suggestions"}
    assert words in result["message"]
    assert "\n" not in result["message"]
    assert field is None or result["field"] == field


def test_what_is_missing_is_reported_at_once(post):
    error = post("predict", {"cluster": "dgx-h100", "chips": 8})[1]
    assert error["code"] == "missing"
    assert [suggestion.partition(":")[0] for suggestion in error["suggestions"]] == ["model", "global_batch", "seq_len"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {"Host": "evil.example"}, 403),
        ("POST", "/api/predict", {"Host": "evil.example:80"}, 403),
        ("GET", "/", {"Host": ""}, 403),
        ("POST", "/api/predict", {"Origin": "http://evil.example"}, 403),
        ("POST", "/api/predict", {"Content-Type": "text/plain"}, 415),
        ("GET", "/../../etc/passwd", {}, 404),
        ("GET", "/api/predict", {}, 404),
        ("POST", "/", {}, 404),
        ("DELETE", "/", {}, 405),
        ("POST", "/api/predict", {"Content-Type": "application/json", "Content-Length": str(MOST_BYTES + 1)}, 413),
        ("POST", "/api/predict", {"Content-Type": "application/json", "Content-Length": "9" * 5000}, 413),
        ("POST", "/api/predict", {"Content-Type": "application/json", "Content-Length": "-1"}, 411),
    ],
)
def test_what_is_refused_is_an_error_as_json(send, method, path, headers, status):
    answer_status, answered, content = send(method, path, "" if method == "POST" else None, **headers)
    assert (answer_status, answered["Content-Type"]) == (status, "application/json")
    assert json.loads(content)["message"]


def test_this_machine_under_other_ports_is_let_in(send):
    assert send("GET", "/?tp=2", Host="localhost:9000")[0] == 200


def test_the_page_names_no_other_address(send):
    _, headers, content = send("GET", "/")
    text = content.decode()
    assert "http" not in text.replace("http-equiv", "").replace("https?", "")
    assert len(content) < 60_000
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert page()[0].encode() == content


def test_a_port_in_use_is_one_sentence(server, capfd):
    assert app.run(["web", "--no-browser", "--port", str(server.server_address[1])]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.strip() == f"perfmodel: port={server.server_address[1]}: is in use; give another --port, or --port 0 for a free one"
    assert app.run(["web", "--no-browser", "--port", "70000"]) == 2
