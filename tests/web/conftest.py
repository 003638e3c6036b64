"""A server of its own for each file, and a browser that is skipped where there is no Chromium."""

import http.client
import json
from threading import Thread

import pytest

from perfmodel.web.endpoints import PageServer
from tests.web.browser import CHROMIUM, browser

JOB = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 8, "global_batch": 64, "seq_len": "4k", "tp": 2, "zero": 1}


@pytest.fixture(scope="module")
def server():
    with PageServer(0) as page_server:
        thread = Thread(target=page_server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield page_server
        page_server.shutdown()
        thread.join()


@pytest.fixture
def send(server):
    """Send a request: (status, headers, content)."""

    def run(method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.headers, content

    return run


@pytest.fixture
def post(send):
    """Ask for an answer: (status, object)."""

    def run(verb, data, **headers):
        text = data if isinstance(data, (str, bytes)) else json.dumps(data)
        status, _, content = send("POST", f"/api/{verb}", text, **{"Content-Type": "application/json", **headers})
        return status, json.loads(content)

    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no Chromium here")
    with browser(tmp_path_factory.mktemp("chromium")) as chromium_page:
        yield chromium_page
