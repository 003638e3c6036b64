"""Parameter counts against the published ones."""

import csv
from pathlib import Path

import pytest

from perfmodel.workload.models import list_models, load_model

ROWS = list(csv.DictReader((Path(__file__).parent / "model_parameters.csv").read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['source'].split(' ')[0]}")
def test_parameter_count_is_the_published_one(row):
    assert abs(load_model(row["model"]).num_parameters - int(row["num_parameters"])) <= int(row["tolerance"])


def test_every_shipped_model_has_a_published_count():
    assert {row["model"] for row in ROWS} == set(list_models())


@pytest.mark.parametrize(
    "name, count",
    [
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-72b", 72_706_203_648),
        ("mistral-7b", 7_241_732_096),
        ("gemma-7b", 8_537_680_896),
        ("gemma-2-9b", 9_241_705_984),
        ("phi-2", 2_779_683_840),
        ("gpt-neox-20b", 20_554_567_680),
        ("falcon-7b", 6_921_720_704),
        ("opt-125m", 125_239_296),
    ],
)
def test_parameter_count_is_that_of_the_model_card(name, count):
    """The totals that the Hugging Face pages of these models show."""
    assert load_model(name).num_parameters == count


@pytest.mark.parametrize(
    "name, active, without_embedding",
    [
        ("mixtral-8x7b", 12.88, 12.749),
        ("mixtral-8x22b", 39.161, 38.96),
        ("deepseek-v2", 21.376, 20.852),
        ("deepseek-v2-lite", 2.661, 2.451),
        ("kimi-k2", 32.861, 31.687),
        ("qwen2-57b-a14b", 14.249, 13.705),
        ("qwen3-30b-a3b", 3.353, 3.042),
        ("qwen3-235b-a22b", 22.191, 21.568),
        ("deepseek-v3", 37.552, 36.626),
        ("gpt-oss-20b", 4.187, 3.608),
        ("gpt-oss-120b", 5.712, 5.133),
        ("llama-4-scout", 17.173, 16.138),
        ("llama-4-maverick", 17.185, 16.15),
        ("glm-4.5", 33.632, 32.856),
        ("glm-4.5-air", 13.424, 12.803),
        ("glm-5", 41.785, 40.833),
        ("dbrx", 36.47, 35.853),
        ("minimax-m2", 11.031, 10.416),
        ("qwen3-next-80b-a3b", 3.875, 3.564),
    ],
)
def test_active_parameters_are_those_of_the_chosen_experts(name, active, without_embedding):
    """Counted on the models that transformers 5.23 builds, experts that a token does not choose taken away. [1e9]"""
    model = load_model(name)
    assert round(model.num_active_parameters / 1e9, 3) == active
    assert round(model.num_active_parameters_without_embedding / 1e9, 3) == without_embedding
