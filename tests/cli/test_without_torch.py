"""Commands that need torch report that in one sentence where it is not installed."""

import importlib.util

import pytest


@pytest.fixture
def no_torch(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))


@pytest.mark.parametrize(
    "arguments", [["run", "ddp"], ["calibrate"], ["import", "torch.nn:Linear(8, 8)"], ["demo"]], ids=lambda arguments: arguments[0]
)
def test_one_sentence(arguments, no_torch, call):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "install perfmodel[torch]" in err
    assert err.count("\n") == 1
