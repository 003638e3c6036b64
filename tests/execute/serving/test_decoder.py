"""A decoder with a cache says what the uncached forward pass of the same weights says, however its tokens come."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.serving.cache import BLOCK_TOKENS  # noqa: E402
from perfmodel.execute.serving.decoder import build_decoder  # noqa: E402
from perfmodel.execute.serving.step import Chunk, make_step  # noqa: E402
from perfmodel.execute.uniform.data_parallel import clean_name  # noqa: E402
from perfmodel.execute.uniform.model import Transformer  # noqa: E402
from perfmodel.execute.uniform.weights import fill  # noqa: E402
from tests.execute.jobs import EXPERT_VARIANTS, VARIANTS, tiny  # noqa: E402
from tests.marks import mostly_slow  # noqa: E402

#: Of three sequences; none is a whole number of blocks.
LENGTHS = (37, 21, 50)


def uncached(config, tokens):
    """[s, vocabulary]: the training model's logits of one sequence."""
    model = Transformer(replace(config, num_mtp_layers=0))
    for name, parameter in model.named_parameters():
        fill(config, clean_name(name), parameter)
    with torch.no_grad():
        return [model(torch.tensor([row]))[0] for row in tokens]


def some_tokens(config, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def decoder_for(config, lengths=LENGTHS):
    decoder = build_decoder(config, num_blocks=sum(-(-length // BLOCK_TOKENS) for length in lengths) + 2)
    for sequence, length in enumerate(lengths):
        decoder.sharding.cache.reserve(sequence, length)
    return decoder


def run(decoder, *chunks):
    """Logits by sequence of a step of (sequence, start, tokens)."""
    step = make_step([Chunk(sequence, start, tuple(tokens)) for sequence, start, tokens in chunks], decoder.sharding.cache)
    return dict(zip((chunk.sequence for chunk in step.chunks), decoder.run(step), strict=True))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", mostly_slow([*VARIANTS, *EXPERT_VARIANTS], quick=3))
def test_cached_steps_equal_the_uncached_pass(variant):
    """Sequences of different lengths: prompts whole, in chunks, and token by token, in the same steps."""
    config = tiny(variant)
    tokens = some_tokens(config)
    expected, decoder = uncached(config, tokens), decoder_for(config)
    close(run(decoder, (0, 0, tokens[0][:30]))[0], expected[0][29])  # whole
    for start, stop in ((0, 7), (7, 18)):  # in chunks, beside decode steps of the first
        found = run(decoder, (1, start, tokens[1][start:stop]), (0, 30 + (start > 0), [tokens[0][30 + (start > 0)]]))
        close(found[1], expected[1][stop - 1])
        close(found[0], expected[0][30 + (start > 0)])
    for at in range(6):  # token by token from nothing, then two sequences of other lengths beside it
        close(run(decoder, (2, at, [tokens[2][at]]))[2], expected[2][at])
    run(decoder, (2, 6, tokens[2][6:40]))
    for step in range(3):
        at = (32 + step, 18 + step, 40 + step)
        found = run(decoder, *((i, at[i], [tokens[i][at[i]]]) for i in range(3)))
        for i in range(3):
            close(found[i], expected[i][at[i]])
