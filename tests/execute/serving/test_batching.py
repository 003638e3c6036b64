"""Requests that share steps get the tokens that each gets alone."""

import random

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.serving.cache import BLOCK_TOKENS  # noqa: E402
from perfmodel.execute.serving.decoder import build_decoder  # noqa: E402
from perfmodel.foundation.errors import InputError  # noqa: E402
from tests.execute.jobs import tiny  # noqa: E402
from tests.execute.serving.batching import ServedRequest, serve  # noqa: E402


def some_requests(config, number, *, seed=1):
    pick = random.Random(seed)
    return [
        ServedRequest(
            tuple(pick.randrange(config.vocab_size) for _ in range(pick.randint(1, 30))), pick.randint(1, 20), arrives=pick.randint(0, 12)
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("variant", ["llama", "deepseek", "nemotron", "qwen3-next"])
@pytest.mark.slow
def test_tokens_are_those_of_each_request_alone(variant):
    config = tiny(variant)
    requests = some_requests(config, 7)
    decoder = build_decoder(config, num_blocks=9)
    cache = decoder.cache
    alone = [serve(decoder, [ServedRequest(request.prompt, request.num_new)], step_tokens=64)[0][0] for request in requests]
    together, records = serve(decoder, requests, step_tokens=12)
    assert together == alone
    # steps were shared, prompts were chunked, decoding went on concurrently, and all blocks were returned
    assert max(record.decoding for record in records) >= 3
    assert any(record.decoding and record.prompt_rows for record in records)
    assert all(record.decoding + record.prompt_rows <= 12 for record in records)
    assert cache.free == list(range(9))


def test_the_cache_is_blocks_of_sixteen_tokens():
    config = tiny("llama")  # 4 layers, 4 key-value heads of 8
    block = 4 * 2 * 4 * 8 * 4 * BLOCK_TOKENS
    decoder = build_decoder(config, num_blocks=10)
    cache = decoder.cache
    assert cache.num_bytes == 10 * block
    assert cache.num_bytes == sum(pool.untyped_storage().nbytes() for pools in cache.pools.values() for pool in pools)
    for sequence, tokens in enumerate((1, 16, 17, 40)):
        cache.reserve(sequence, tokens)
    assert cache.bytes_held == (1 + 1 + 2 + 3) * block
    _, records = serve(build_decoder(config, num_blocks=10), [ServedRequest((1,) * 20, 13), ServedRequest((2,) * 10, 7)], step_tokens=64)
    assert max(record.cache_bytes for record in records) == (2 + 1) * block  # 32 and 16 tokens
    latent = build_decoder(tiny("deepseek"), num_blocks=3).cache
    assert latent.block_bytes == 4 * (16 + 4) * 4 * BLOCK_TOKENS


def test_a_request_beyond_the_cache_is_refused():
    decoder = build_decoder(tiny("llama"), num_blocks=2)
    with pytest.raises(InputError, match="take 3 blocks"):
        serve(decoder, [ServedRequest((1,) * 30, 10)], step_tokens=8)
