import subprocess
import sys

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import list_models, load_model


def test_models_are_listed_in_order():
    assert list(list_models()) == sorted(list_models())


@pytest.mark.parametrize(
    "name, words",
    [
        ("llama3-8b", "'llama-3-8b'"),
        ("LLAMA-3-8B", "'llama-3-8b'"),
        ("megatron-22", "'megatron-22b'"),
        ("gtp2", "'gpt2'"),
        ("", "no shipped model has this name"),
        ("a\0b", "no shipped model has this name"),
        ("x" * 5000, "no shipped model has this name"),
        ("../models/gpt2", "there is no such file"),
        ("/nowhere/config.json", "there is no such file"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(name, words):
    with pytest.raises(InputError) as caught:
        load_model(name)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


def test_path_is_read_where_no_name_fits(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 128}'
    )
    assert load_model(tmp_path).num_hidden_layers == load_model(str(tmp_path / "config.json")).num_hidden_layers == 2


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(tmp_path)


def test_reading_a_model_loads_no_heavy_package():
    code = "import sys; from perfmodel.workload.models import load_model; load_model('gpt2'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pandas", "scipy", "matplotlib", "pydantic", "transformers"} & set(loaded)
