"""A decoder with a cache says what the uncached forward pass of the same weights says, however its tokens come."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.serving.cache import BLOCK_TOKENS  # noqa: E402
from perfmodel.execute.serving.decoder import build_decoder  # noqa: E402
from perfmodel.execute.serving.step import Chunk, make_step  # noqa: E402
from perfmodel.execute.uniform.model import Transformer  # noqa: E402
from perfmodel.execute.uniform.weights import canonical_name, fill  # noqa: E402
from perfmodel.workload.layer_specs import Experts  # noqa: E402
from tests.execute.jobs import EXPERT_VARIANTS, STATE_VARIANTS, VARIANTS, tiny  # noqa: E402
from tests.marks import mostly_slow  # noqa: E402

#: Of three sequences; none is a whole number of blocks.
LENGTHS = (37, 21, 50)


def uncached(config, tokens):
    """[s, vocabulary]: the training model's logits of one sequence."""
    model = Transformer(replace(config, num_mtp_layers=0))
    for name, parameter in model.named_parameters():
        fill(config, canonical_name(name), parameter)
    with torch.no_grad():
        return [model(torch.tensor([row]))[0] for row in tokens]


def some_tokens(config, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def decoder_for(config, lengths=LENGTHS):
    decoder = build_decoder(config, num_blocks=sum(-(-length // BLOCK_TOKENS) for length in lengths) + 2)
    for sequence, length in enumerate(lengths):
        decoder.cache.reserve(sequence, length)
    return decoder


def run(decoder, *chunks):
    """Logits by sequence of a step of (sequence, start, tokens)."""
    step = make_step([Chunk(sequence, start, tuple(tokens)) for sequence, start, tokens in chunks], decoder.cache)
    return dict(zip((chunk.sequence for chunk in step.chunks), decoder.run(step), strict=True))


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", mostly_slow(["sparse", *STATE_VARIANTS, *VARIANTS, *EXPERT_VARIANTS, "glm-5"], quick=7))
@pytest.mark.slow
def test_cached_steps_equal_the_uncached_pass(variant):
    """Sequences of different lengths: prompts whole, in chunks, and token by token, in the same steps."""
    config = tiny(variant)
    tokens = some_tokens(config)
    expected, decoder = uncached(config, tokens), decoder_for(config)
    assert_close(run(decoder, (0, 0, tokens[0][:30]))[0], expected[0][29])  # whole
    for start, stop in ((0, 7), (7, 18)):  # in chunks, together with decode steps of the first
        logits = run(decoder, (1, start, tokens[1][start:stop]), (0, 30 + (start > 0), [tokens[0][30 + (start > 0)]]))
        assert_close(logits[1], expected[1][stop - 1])
        assert_close(logits[0], expected[0][30 + (start > 0)])
    for at in range(6):  # token by token from nothing, then two sequences of other lengths next to it
        assert_close(run(decoder, (2, at, [tokens[2][at]]))[2], expected[2][at])
    run(decoder, (2, 6, tokens[2][6:40]))
    for step in range(3):
        at = (32 + step, 18 + step, 40 + step)
        logits = run(decoder, *((i, at[i], [tokens[i][at[i]]]) for i in range(3)))
        for i in range(3):
            assert_close(logits[i], expected[i][at[i]])


#: Sinks, biases and windows of gpt-oss, which training's modules have not.
GPT_OSS = dict(
    experts=Experts(num_experts=8, top_k=2, width=24, bias=True, router_bias=True), attention_sinks=True, sliding_window=8,
    full_attention_every=2, qkv_bias=True, attention_output_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("config", [tiny(**GPT_OSS), tiny("mixtral"), tiny("deepseek"), tiny("sparse")], ids=lambda config: config.name)
def test_parameters_are_those_of_the_configuration(config):
    sizes = {canonical_name(name): parameter.shape.numel() for name, parameter in build_decoder(config, num_blocks=1).named_parameters()}
    assert sizes == {shape.name: shape.num_elements for shape in config.parameter_shapes()}


@pytest.mark.slow
def test_sinks_take_a_share_of_every_softmax():
    """Against a softmax written out, in a layer with a window and one without; tokens one by one as well as together."""
    config = tiny(**GPT_OSS)
    tokens = some_tokens(config, (40,))[0]
    together, single = decoder_for(config, (40,)), decoder_for(config, (40,))
    expected = run(together, (0, 0, tokens))[0]
    for at in range(40):
        logits = run(single, (0, at, tokens[at : at + 1]))[0]
    assert_close(logits, expected)
    for layer in (0, 1):
        core, sinks = together.layers[str(layer)].attention.core, torch.linspace(-2, 2, 8)
        keys, values = together.cache.pools[layer]
        q, (group,) = torch.randn(1, 40, 8, 8, generator=torch.Generator().manual_seed(2)), together.sharding.step.groups
        k, v = (pool[:40].repeat_interleave(2, dim=1) for pool in (keys, values))
        scores = torch.einsum("qnd,knd->nqk", q[0], k) / 8**0.5
        at = torch.arange(40)
        unseen = (at > at[:, None]) | ((at <= at[:, None] - core.window) if core.window else False)
        powers = scores.masked_fill(unseen, -torch.inf).exp()
        weights = powers / (powers.sum(-1, keepdim=True) + sinks.exp().view(-1, 1, 1))
        assert_close(core.attend(q, keys, values, group, sinks), torch.einsum("nqk,knd->qnd", weights, v).reshape(1, 40, 64))


def test_biases_of_experts_are_added_to_each_product():
    mixture = build_decoder(tiny(**GPT_OSS), num_blocks=1).layers["0"].mlp
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(2))
    up, down = (linear.weight.view(8, -1, linear.weight.shape[-1]) for linear in (mixture.experts.up, mixture.experts.down))
    for_up, for_down = (linear.bias.view(8, -1) for linear in (mixture.experts.up, mixture.experts.down))
    with torch.no_grad():
        scores = mixture.router(x[0]).softmax(-1)
        expected = torch.zeros(5, 64)
        for token in range(5):
            best = scores[token].topk(2)
            for share, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
                gate, plain = (up[expert] @ x[0, token] + for_up[expert]).chunk(2)
                expected[token] += share * (down[expert] @ (torch.nn.functional.silu(gate) * plain) + for_down[expert])
        assert_close(mixture(x)[0], expected)
