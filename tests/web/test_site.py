"""The static page: perfmodel in the browser, by Pyodide, answers as perfmodel does here."""

import json
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from perfmodel.cli import app as cli
from perfmodel.foundation.errors import InputError
from perfmodel.web.answers import answer, known
from perfmodel.web.site import write_site
from tests.web.test_endpoints import TRAINER

#: Made by `python -m tests.web.pyodide build/pyodide` (`make build/pyodide/pyodide-lock.json`).
RUNTIME = Path(__file__).parents[2] / "build" / "pyodide"
HAS_RUNTIME = (RUNTIME / "pyodide-lock.json").is_file()

JOBS = [
    {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 64, "global_batch": 512, "seq_len": 8192, "tp": 2, "zero": 1},
    {"model": "llama-3.1-405b", "cluster": "dgx-h100", "chips": 16384, "global_batch": 2048, "seq_len": "8k", "tp": 8, "pp": 16},
    {
        "model": "deepseek-v3",
        "cluster": "dgx-h100",
        "chips": 2048,
        "global_batch": 15360,
        "seq_len": 4096,
        "pp": 16,
        "ep": 64,
        "profile": "megatron",
    },
    {"model": "qwen3-8b", "cluster": "hgx-h200", "chips": 8, "global_batch": 8, "seq_len": "1m", "cp": 8, "recompute": "full"},
    {"model": "mixtral-8x7b", "cluster": "dgx-a100", "chips": 128, "global_batch": 1024, "seq_len": 4096, "ep": 8, "fsdp": 16},
    {"model": "gpt2", "cluster": "rtx4090-24gb", "chips": 1, "global_batch": 8, "seq_len": 1024},
]


@pytest.fixture(scope="module")
def site(tmp_path_factory, page):
    """The page in a browser, from a server of files."""
    if not HAS_RUNTIME:
        pytest.skip("no Pyodide here")
    folder = tmp_path_factory.mktemp("site")
    write_site(folder, str(RUNTIME))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        page.open(f"http://127.0.0.1:{server.server_address[1]}/")
        page.wait("document.body.dataset.predicted", 120)
        yield page
        page.send("Page.navigate", url="about:blank")
        server.shutdown()
        thread.join()


def close(actual, expected, where=""):
    """Whether two answers hold the same; numbers may differ in their last digits, as another libm rounds them."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name, value in expected.items():
            if not name.endswith("_time") or name == "step_time":
                close(actual[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            close(one, other, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-15), where
    else:
        assert actual == expected, where


def asked(site, verb, data):
    return site.value(f"ask({json.dumps(verb)}, {json.dumps(data)})")


@pytest.mark.slow
class TestInTheBrowser:
    def test_first_page(self, site):
        assert "Fits" in site.text("#verdict")
        assert site.problems == []
        site.wait("document.querySelectorAll('#plans tr').length > 3", 120)

    def test_known_names(self, site):
        close(asked(site, "known", {}), json.loads(json.dumps(known())))

    @pytest.mark.parametrize("job", JOBS, ids=lambda job: job["model"])
    def test_same_prediction(self, site, job):
        close(asked(site, "predict", job), json.loads(json.dumps(answer("predict", job))))

    def test_same_search(self, site):
        job = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "chips": 32, "global_batch": 256, "seq_len": 4096}
        close(asked(site, "search", job), json.loads(json.dumps(answer("search", job))))

    def test_pasted_config(self, site):
        data = {"config": TRAINER, "cluster": "dgx-h100", "chips": 8}
        close(asked(site, "predict", data), json.loads(json.dumps(answer("predict", data))))

    def test_bad_input(self, site):
        site.choose("model", "llama-9")
        site.wait("!document.getElementById('error').hidden")
        assert "llama-9" in site.text("#error")
        site.choose("model", "llama-3-8b")
        site.wait("document.getElementById('error').hidden")

    def test_cancelled_search_ends_and_others_go_on(self, site):
        job = json.dumps(JOBS[2])
        site.value(
            "{window.ended = ''; const stop = new AbortController();"
            f" ask('search', {job}, {{signal: stop.signal}}).catch(error => {{ window.ended = error.name; }});"
            f" window.other = ask('explain', {json.dumps(JOBS[0])}).then(found => {{ window.explained = found.step_time; }});"
            " setTimeout(() => stop.abort(), 500); }"
        )
        site.wait("window.ended === 'AbortError'", 20)
        site.wait("window.explained", 120)


@pytest.mark.slow
def test_answers_without_pydantic():
    """The page in the browser predicts and searches with numpy and PyYAML alone: pydantic would be loaded at its start."""
    program = (
        "import json, sys; sys.modules['pydantic'] = sys.modules['pydantic_core'] = None\n"
        "from perfmodel.web.answers import answer_line\n"
        f"print(json.dumps([answer_line(verb, {JOBS[0]!r}) for verb in ('known', 'predict', 'search', 'explain')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert [list(line) for line in json.loads(done.stdout)] == [["answer"]] * 4


@pytest.mark.skipif(not HAS_RUNTIME, reason="no Pyodide here")
def test_command_writes_the_page(tmp_path, capfd):
    code, out = cli.run(["web", "--static", str(tmp_path / "site"), "--pyodide", str(RUNTIME)]), capfd.readouterr().out
    assert code == 0
    assert "files in" in out
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"index.html", "worker.js", "perfmodel.zip", "pyodide"}


def test_address_of_pyodide(tmp_path):
    files = write_site(tmp_path, "https://example.org/pyodide/full/")
    assert [file.name for file in files] == ["perfmodel.zip", "worker.js", "index.html"]
    assert '"https://example.org/pyodide/full/"' in (tmp_path / "worker.js").read_text()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--static", "site"], "--pyodide: is missing"),
        (["--pyodide", "x"], "--pyodide: is for a page of files"),
        (["--static", "site", "--pyodide", "nowhere"], "is no folder of Pyodide"),
    ],
)
def test_bad_flags(tmp_path, monkeypatch, capfd, flags, part):
    monkeypatch.chdir(tmp_path)
    code, err = cli.run(["web", *flags]), capfd.readouterr().err
    assert code == 2
    assert part in err
    assert list(tmp_path.iterdir()) == []


def test_core_without_packages_is_refused(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "pyodide.mjs").write_text("")
    (tmp_path / "core" / "pyodide-lock.json").write_text('{"packages": {"numpy": {"file_name": "numpy.whl"}}}')
    with pytest.raises(InputError, match="not its core"):
        write_site(tmp_path / "site", str(tmp_path / "core"))
    assert not (tmp_path / "site").exists()
