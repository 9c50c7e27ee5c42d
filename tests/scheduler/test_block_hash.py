"""Golden vectors, the two chains against each other, and the root's fields kept apart."""

from dataclasses import replace

import numpy as np
import pytest
import xxhash
from scheduler_harness import make_identity

from pagefleet.scheduler.block_hash import (
    block_hashes,
    root_hash,
    route_depth,
    route_hashes,
    route_tokens,
)

TOKENS = np.arange(1, 1025, dtype=np.int32)
ROOT = bytes(range(16))


def test_golden_vectors():
    assert root_hash(make_identity()).hex() == "2dd2783fde450293fc713136c977a785"
    assert [h.hex() for h in block_hashes(ROOT, TOKENS[:33], 16)] == [
        "899478102667613a94f2b2c373607ffa",
        "4ecda4a97d00b819f782d8ab53a4220e",
    ]
    assert route_hashes(ROOT, TOKENS, 16)[-1].hex() == "fd29c6f6df3fe5eb8af29b1008a2946c"


def test_pool_chain_is_xxh3_of_predecessor_and_little_endian_tokens():
    first = xxhash.xxh3_128_digest(ROOT + TOKENS[:16].astype("<i4").tobytes())
    second = xxhash.xxh3_128_digest(first + TOKENS[16:32].astype("<i4").tobytes())
    assert block_hashes(ROOT, TOKENS[:40], 16) == [first, second]


def test_hashes_do_not_depend_on_the_arrays_layout():
    strided = np.repeat(TOKENS, 2)[::2]
    assert block_hashes(ROOT, strided, 16) == block_hashes(ROOT, TOKENS, 16)


@pytest.mark.parametrize("num_tokens", [0, 1, 15])
def test_less_than_a_block_has_no_hash(num_tokens):
    assert block_hashes(ROOT, TOKENS[:num_tokens], 16) == []
    assert route_hashes(ROOT, TOKENS[:num_tokens], 16) == ()


def test_route_chain_is_the_pool_chain_for_256_tokens():
    assert list(route_hashes(ROOT, TOKENS[:256], 16)) == block_hashes(ROOT, TOKENS[:256], 16)


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "expected"),
    [
        (16, 300, [16 * i for i in range(1, 17)]),
        (16, 1024, [*(16 * i for i in range(1, 17)), 512, 768, 1024]),
        (64, 800, [64, 128, 192, 256, 512, 768]),
        (256, 800, [256, 512, 768]),
        (512, 1600, [512, 1024, 1536]),
        (48, 760, [48, 96, 144, 192, 240, 480, 720]),
    ],
)
def test_entries_of_the_route_chain_cover(block_size, num_tokens, expected):
    depths = range(1, route_depth(num_tokens, block_size) + 1)
    assert [route_tokens(depth, block_size) for depth in depths] == expected
    assert route_tokens(0, block_size) == 0
    tokens = np.arange(num_tokens, dtype=np.int32)
    assert len(route_hashes(ROOT, tokens, block_size)) == len(expected)


def test_route_hash_covers_all_tokens_before_it():
    changed = TOKENS.copy()
    changed[600] += 1
    ours, theirs = route_hashes(ROOT, TOKENS, 16), route_hashes(ROOT, changed, 16)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True] * 17 + [False] * 2


def test_adapter_and_salt_are_kept_apart():
    plain = make_identity()
    roots = [
        root_hash(replace(plain, **fields))
        for fields in (
            {},
            {"adapter": "x"},
            {"salt": "x"},
            {"adapter": "ab", "salt": ""},
            {"adapter": "a", "salt": "b"},
            {"secret": "x"},
            {"weights_version": 1},
            {"block_size": 32},
            {"kv_dtype": "bfloat16"},
            {"model_fingerprint": "fak"},
            {"salt": "\ud83d"},
        )
    ]
    assert len(set(roots)) == len(roots)
