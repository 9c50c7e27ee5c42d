"""What identifies a model by content, in milliseconds. Knows where tensors lie, not what they are.

BLAKE2b over the configuration (without fields that only tell how it was written) and, in order
of name, every tensor's name, dtype, shape and up to 32 samples of 256 bytes spread over it from
its first to its last byte. Sharding and file names do not matter. An edit that misses every
sample is not seen: give edited weights another weights_version.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Fields of config.json that say how it was written, not what the model computes.
_UNHASHED_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_SAMPLES_PER_TENSOR = 32
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. begin, end: byte offsets in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def fingerprint(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> str:
    """32 hex digits. config: as JSON has it."""
    digest = hashlib.blake2b(digest_size=16)
    kept = {name: value for name, value in config.items() if name not in _UNHASHED_FIELDS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    files: dict[Path, BinaryIO] = {}
    try:
        for name, stored in sorted(tensors.items()):
            if stored.path not in files:
                files[stored.path] = stored.path.open("rb", buffering=0)
            digest.update(f"\0{name}\0{stored.dtype}\0{stored.shape}\0".encode())
            _hash_samples(digest, files[stored.path], stored)
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()


def _hash_samples(digest: "hashlib.blake2b", file: BinaryIO, stored: StoredTensor) -> None:
    size = stored.end - stored.begin
    if size <= _SAMPLES_PER_TENSOR * _SAMPLE_BYTES:
        offsets, length = [0], size
    else:
        last, steps = size - _SAMPLE_BYTES, _SAMPLES_PER_TENSOR - 1
        offsets, length = [last * step // steps for step in range(steps + 1)], _SAMPLE_BYTES
    for offset in offsets:
        file.seek(stored.begin + offset)
        digest.update(file.read(length))
