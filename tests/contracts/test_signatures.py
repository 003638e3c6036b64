"""The typed signatures that are checked in are those of the records that the verbs take."""

import inspect

import perfmodel
from tests.signatures import STUB, public_functions, stub_text


def test_the_stub_is_what_the_records_give():
    assert STUB.read_text(encoding="utf-8") == stub_text(), "write it again with `python -m tests.signatures`"


def test_every_argument_of_a_record_has_a_line_of_help():
    for function in (perfmodel.predict, perfmodel.find_plans, perfmodel.serve, perfmodel.find_limits):
        documented = function.__doc__.partition("Args:")[2]
        for name, parameter in inspect.signature(function).parameters.items():
            if name in ("model", "chips", "tp", "micro_batch", "profile"):
                assert f"\n    {name}: " in documented
            assert parameter.annotation is not inspect.Parameter.empty
    assert "--" not in perfmodel.predict.__doc__.partition("Args:")[2]  # options of the command line are arguments here


def test_every_public_name_is_in_the_stub():
    text = STUB.read_text(encoding="utf-8")
    for name in perfmodel.__all__:
        value = getattr(perfmodel, name)
        assert f"{name} as {name}" in text or f"def {name}(" in text or f"\n{name} = " in text or not callable(value), name
    assert len(public_functions()) > 40


def test_a_list_of_one_value_gives_a_list_of_results():
    job = dict(model="gpt2", cluster="dgx-h100", chips=8, global_batch=8, seq_len=1024)
    one = perfmodel.predict(**job)
    for listed in ({"chips": [8]}, {"tp": [1]}, {"model": ["gpt2"]}):
        predictions = perfmodel.predict(**job | listed)
        assert isinstance(predictions, perfmodel.Predictions)
        assert [prediction.step_time for prediction in predictions] == [one.step_time]
    assert isinstance(perfmodel.find_plans(**job | {"chips": [8]}, top=1), tuple)
