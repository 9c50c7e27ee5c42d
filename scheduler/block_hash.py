"""Both hash chains over a token sequence. Knows tokens and bytes; nothing of blocks or tiers.

Pool chain:   h_i = XXH3-128(h_{i-1} ‖ tokens of block i), h_0's predecessor is the root.
Route chain:  the same function over strides: each block of the first 256 tokens is a stride,
              then 256 tokens are one, so that a long prompt costs a router few look-ups.

    tokens   0 ────────────── 256 ────────────── 512 ──────
    pool     |b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|b|
    route    |s|s|s|s|s|s|s|s|        s        |        s

Tokens are int32 little-endian, hashes 16 bytes in XXH3's canonical (big-endian) order: equal in
every process, on every machine. The hash is fast, not proof: who serves a hit compares tokens.
"""

import hashlib
from bisect import bisect_left
from struct import pack

import numpy as np
import xxhash

from ..protos.messages import CacheIdentity
from .output import Int32Array

ROUTE_STRIDE_TOKENS = 256
FORMAT_VERSION = 1


def root_hash(identity: CacheIdentity) -> bytes:
    """BLAKE2b-128 of all that KV content depends on besides tokens.

    Each field goes in with its name and both lengths, so no two identities share an encoding.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"pagefleet-root")
    fields = (
        ("format", str(FORMAT_VERSION)),
        ("model", identity.model_fingerprint),
        ("weights", str(identity.weights_version)),
        ("kv_dtype", identity.kv_dtype),
        ("block_size", str(identity.block_size)),
        ("adapter", identity.adapter),
        ("salt", identity.salt),
        ("secret", identity.secret),
    )
    for domain, value in fields:
        for text in (domain, value):
            # A client's text may hold lone surrogates; they must not stop the engine.
            data = text.encode("utf-8", "surrogatepass")
            digest.update(pack("<Q", len(data)) + data)
    return digest.digest()


def split_blocks(token_ids: Int32Array, block_size: int) -> list[bytes]:
    """The bytes of each full block: int32 little-endian, as both chains hash them."""
    num_blocks = len(token_ids) // block_size
    tokens = np.ascontiguousarray(token_ids[: num_blocks * block_size], dtype="<i4")
    return tokens.view(f"V{4 * block_size}").tolist()  # as opaque items: cut by numpy at once


def extend_chain(previous: bytes, blocks: list[bytes]) -> list[bytes]:
    """One hash per element of `blocks`, continuing from `previous`."""
    digest = xxhash.xxh3_128_digest
    hashes: list[bytes] = []
    append = hashes.append
    for block in blocks:
        previous = digest(previous + block)
        append(previous)
    return hashes


def block_hashes(root: bytes, token_ids: Int32Array, block_size: int) -> list[bytes]:
    """The pool chain: one hash per full block."""
    return extend_chain(root, split_blocks(token_ids, block_size))


def num_equal(left: list[bytes], right: list[bytes]) -> int:
    """How many blocks two chains share: where hashes are equal, so is all before them."""
    places = range(min(len(left), len(right)))
    return bisect_left(places, True, key=lambda place: left[place] != right[place])


def stride_blocks(block_size: int) -> int:
    """Blocks in one stride of the route chain; also how many single-block strides lead it."""
    return max(1, ROUTE_STRIDE_TOKENS // block_size)


def route_depth(num_tokens: int, block_size: int) -> int:
    """How many entries the route chain of so many tokens has."""
    stride, num_blocks = stride_blocks(block_size), num_tokens // block_size
    return num_blocks if num_blocks <= stride else stride + num_blocks // stride - 1


def route_tokens(depth: int, block_size: int) -> int:
    """How many tokens its first `depth` entries cover."""
    stride = stride_blocks(block_size)
    num_blocks = depth if depth <= stride else (depth - stride + 1) * stride
    return num_blocks * block_size


def route_hashes(root: bytes, token_ids: Int32Array, block_size: int) -> tuple[bytes, ...]:
    """The route chain: one hash per stride."""
    width = 4 * block_size
    stride = width * stride_blocks(block_size)
    if len(token_ids) < block_size:
        return ()
    data = np.ascontiguousarray(token_ids, dtype="<i4").data.cast("B")
    head = _chain_over(root, data[:stride], width)
    if len(data) < 2 * stride:
        return tuple(head)
    return (*head, *_chain_over(head[-1], data[stride:], stride))


def _chain_over(previous: bytes, data: memoryview, width: int) -> list[bytes]:
    """One hash per full piece of so many bytes. Each is copied just before it is hashed, so that a
    prompt longer than the processor's cache goes through it once."""
    digest = xxhash.xxh3_128_digest
    hashes: list[bytes] = []
    append = hashes.append
    for begin in range(0, len(data) - width + 1, width):
        previous = digest(previous + data[begin : begin + width])
        append(previous)
    return hashes
