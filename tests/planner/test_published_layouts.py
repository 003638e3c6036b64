"""Published layouts of models."""

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.parallel.plan_file import list_plans, read_plan
from perfmodel.planner.published_layouts import PublishedDegrees, published_degrees
from perfmodel.workload.models import list_models, load_model


def test_published_degrees_are_of_shipped_models_and_divide_them():
    published = read_yaml(resource_dir("strategies") / "published_layouts.yaml")["models"]
    assert set(published) <= set(list_models())
    assert not set(published) & set(list_plans())
    for name in published:
        degrees, model = published_degrees(name), load_model(name)
        assert isinstance(degrees, PublishedDegrees)
        assert len(degrees.source) > 20
        assert model.parts.experts.num_experts % degrees.ep == 0
        assert model.num_attention_heads % degrees.tp == 0


def test_a_shipped_plan_says_the_degrees_of_its_model():
    layout, published = read_plan("llama-3.1-405b").layout, published_degrees("llama-3.1-405b")
    assert (published.tp, published.cp, published.pp, published.zero, published.ep) == (layout.tp, layout.cp, layout.pp, 2, 1)


def test_of_most_models_nothing_is_known():
    assert published_degrees("llama-3-8b") is None
    assert published_degrees("no such model") is None
    assert published_degrees("fsdp") is None  # a plan of that name is of another model
