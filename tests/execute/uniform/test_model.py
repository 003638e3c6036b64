"""The model that is run is the model that is predicted: the same parameters by name and shape."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.layers.attention import alibi_slopes, causal_attention, unfused_attention  # noqa: E402
from perfmodel.execute.uniform.model import Transformer  # noqa: E402
from perfmodel.execute.uniform.weights import canonical_name, fill  # noqa: E402
from perfmodel.workload.models import load_model  # noqa: E402
from tests.built import DENSE  # noqa: E402
from tests.execute.jobs import VARIANTS, tiny  # noqa: E402
from tests.marks import mostly_slow  # noqa: E402


def parameters(config):
    model = Transformer(config, device="meta")
    return {canonical_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_the_configuration(variant):
    assert parameters(tiny(variant)) == {shape.name: shape.shape for shape in tiny(variant).parameter_shapes()}


@pytest.mark.parametrize("name", DENSE)
def test_shipped_models_have_their_parameters(name):
    config = load_model(name).with_layers(2)
    assert parameters(config) == {shape.name: shape.shape for shape in config.parameter_shapes()}


def build(config, *, fused):
    model = Transformer(config, fused_attention=fused)
    for name, parameter in model.named_parameters():
        fill(config, canonical_name(name), parameter)
    return model


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, quick=3))
def test_fused_and_unfused_attention_agree(variant):
    config = tiny(variant)
    tokens = torch.randint(config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))
    fused, unfused = build(config, fused=True), build(config, fused=False)
    outputs = fused(tokens), unfused(tokens)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    sum(output.square().mean() for output in outputs).backward()
    for ours, theirs in zip(fused.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attend", [causal_attention, partial(unfused_attention, probability=0.0)])
def test_scores_of_alibi_fall_with_the_distance_of_keys(attend):
    slopes, v = alibi_slopes(8), torch.randn(1, 8, 7, 8, generator=torch.Generator().manual_seed(0))
    query, key = torch.arange(2, 7).unsqueeze(1), torch.arange(7)
    scores = (slopes.view(1, -1, 1, 1) * (key - query)).masked_fill(key > query, -torch.inf)
    output = attend(torch.zeros(1, 8, 5, 8), torch.zeros(1, 8, 7, 8), v, window=0, slopes=slopes)
    torch.testing.assert_close(output, scores.softmax(-1) @ v)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_a_later_one(variant):
    config = tiny(variant)
    model = build(config, fused=True)
    tokens = torch.randint(config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])
