"""Checkpoints from disk or hub: which files, which tensors, in which dtype. Knows no decoder.

Tensors are memory-mapped: one that is used as it stands costs no memory of its own. Quantised
linears are unpacked as they are read, one at a time, and made float unless codes are asked for.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..kernels.quantized_weight import QuantizedWeight
from .checkpoint_folder import find_gguf
from .fingerprint import StoredTensor, fingerprint
from .gguf_checkpoint import GgufCheckpoint
from .heap import forget_pages
from .models.config import CheckpointError, DecoderConfig, UnsupportedModel
from .models.config_fields import ConfigFields
from .models.families import parse_config, read_config
from .models.tensor_names import StoredPlace
from .quantized import dequantize, read_codes, read_quantization

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Rotary frequencies that old checkpoints carry although they follow from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
_LARGEST_HEADER = 100 * 2**20


# Tensors read, and how many there are.
Progress = Callable[[int, int], None]


class StoredWeights(Protocol):
    """The tensors of a model by their names in a Hugging Face checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most bytes have, integers apart."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """How many tensors were asked for, and how many there are."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor as it is stored, or float32 if quantised; raises `ModelError` where there is
        none of this name and shape."""
        ...

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """A weight of this name and shape as codes; None where it is stored in another way."""
        ...

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        ...

    def check_all_used(self) -> None:
        """A tensor nobody asked for is a feature that would be served wrong."""
        ...

    def forget_pages(self) -> None:
        """Everything was read. What is used as it lies in the file comes back as it is needed."""
        ...

    def fingerprint(self) -> str:
        """32 hex digits that identify the model by content, in milliseconds."""
        ...


def open_model(folder: Path) -> tuple[DecoderConfig, StoredWeights]:
    """What a folder describes and holds: safetensors with config.json, or one GGUF file."""
    gguf_file = find_gguf(folder)
    if gguf_file is None:
        return read_config(folder), Checkpoint(folder)
    checkpoint = GgufCheckpoint(gguf_file)
    return parse_config(checkpoint.config, ConfigFields({}, str(gguf_file))), checkpoint


def resolve_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: itself, or a hub id's snapshot in Hugging Face's cache.

    Honours HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE, as `huggingface_hub` does.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(f"{model} is neither a folder nor a hub id (organisation/name)")
    return _hub_snapshot(model, revision)


def _hub_snapshot(model: str, revision: str | None) -> Path:
    # Imported here: a quarter of a second that folders do not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        path = snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{model} cannot be had from the hub: {error}") from error
    return Path(path)


class Checkpoint:
    """The tensors of a Hugging Face folder by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, StoredTensor] = {}
        for path in _weight_files(folder):
            self._stored.update(_read_header(path))
        self._unused = {name for name in self._stored if not name.endswith(_DERIVED_SUFFIX)}
        self._config = ConfigFields.read(folder / "config.json")
        self._quantization = read_quantization(self._config)
        self._open_path: Path | None = None
        self._open_file: safe_open | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most bytes have, integers apart."""
        totals: dict[str, int] = {}
        for stored in self._stored.values():
            totals[stored.dtype] = totals.get(stored.dtype, 0) + stored.end - stored.begin
        found = {name: size for name, size in totals.items() if name in _DTYPES}
        if not found:
            names = ", ".join(sorted(totals))
            raise UnsupportedModel(f"{self.folder}: weights of dtype {names} are not supported")
        return _DTYPES[max(found, key=lambda dtype: found[dtype])]

    @property
    def progress(self) -> tuple[int, int]:
        """How many tensors were asked for, and how many there are."""
        return len(self._stored) - len(self._unused), len(self._stored)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, memory-mapped, as it is stored; its shape must be the one expected.

        Of a quantised linear: float32, in memory of its own.
        """
        if name not in self._stored and self._is_quantized(name):
            return self._dequantized(name, shape)
        return self._read(name, shape)

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = _DTYPES) -> Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)},"
                f" the configuration asks for {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise UnsupportedModel(
                f"{stored.path}: tensor {name} of dtype {stored.dtype} is not supported"
            )
        self._unused.discard(name)
        return self._open(stored.path).get_tensor(name)

    def _is_quantized(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and f"{module}.qweight" in self._stored
        return is_linear and self._quantization is not None

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """See `StoredWeights`."""
        if self._quantization is None or name in self._stored or not self._is_quantized(name):
            return None
        return read_codes(self._quantization, self._parts_of(name, shape), shape[0])

    def _dequantized(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._quantization is not None
        return dequantize(self._quantization, self._parts_of(name, shape), shape[0])

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> Callable[[str], Tensor | None]:
        """Reads the tensors of a quantised linear by what they hold."""
        assert self._quantization is not None
        module = name.removesuffix(".weight")
        out_features, in_features = shape
        shapes = self._quantization.shapes(out_features, in_features)

        def part(kind: str) -> Tensor | None:
            full = f"{module}.{kind}"
            if kind == "g_idx" and full not in self._stored:
                return None
            return self._read(full, shapes[kind], ("I32", *_DTYPES))

        return part

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._unused.discard(name)
        if self._quantization is not None:
            module = name.removesuffix("weight")
            self._unused -= {f"{module}{part}" for part in self._quantization.parts}

    def check_all_used(self) -> None:
        """A tensor nobody asked for is a feature that would be served wrong."""
        self._unused = {name for name in tuple(self._unused) if not self._is_zero_bias(name)}
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedModel(
                f"{self.folder}: tensors without a use: {', '.join(names[:3])}{more}"
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Some quantisers write a bias of zeros for linears that have none."""
        if not name.endswith(".bias") or not self._is_quantized(
            f"{name.removesuffix('bias')}weight"
        ):
            return False
        return not self._read(name, self._stored[name].shape).any()

    def forget_pages(self) -> None:
        """See `StoredWeights`. One tensor that is used as it lies there, the embedding perhaps,
        keeps all of its file mapped; most others were packed into memory of their own."""
        for path in {stored.path for stored in self._stored.values()}:
            forget_pages(path)

    def fingerprint(self) -> str:
        """See `fingerprint.fingerprint`."""
        return fingerprint(self._config.values, self._stored)

    def _open(self, path: Path) -> safe_open:
        if self._open_path != path or self._open_file is None:
            try:
                self._open_file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            self._open_path = path
        return self._open_file


class CheckpointSource:
    """A checkpoint's tensors, converted to the model's dtype and moved to its device.

    place: where a tensor that the decoder asks for is stored; None = under its own name.
    keep_codes: quantised linears are handed out as they are.
    """

    def __init__(
        self,
        checkpoint: StoredWeights,
        dtype: torch.dtype,
        device: torch.device,
        place: Callable[[str], StoredPlace] = StoredPlace,
        progress: Progress | None = None,
        keep_codes: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._place = place
        self._progress = progress
        self._keep_codes = keep_codes

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `TensorSource`."""
        return self._stored(name, shape).to(self._device, self._dtype)

    def part(self, name: str, shape: tuple[int, ...], dim: int, begin: int, end: int) -> Tensor:
        """Positions [begin, end) along `dim` of a tensor that has this shape in the checkpoint.

        The rest is not read where `dim` is the first; never does it take memory of the process.
        """
        part = self._stored(name, shape).narrow(dim, begin, end - begin)
        return part.contiguous().to(self._device, self._dtype)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """See `TensorSource`."""
        if not self._keep_codes:
            return None
        place = self._place(name)
        if place.num_rows is None:
            weight = self._checkpoint.quantized(place.name, shape)
        else:
            weight = self._checkpoint.quantized(place.name, (place.num_rows, *shape[1:]))
            weight = weight and weight.rows(place.begin, place.begin + shape[0])
        if weight is not None:
            self._tell_progress()
        return weight

    def skip(self, name: str) -> None:
        """See `TensorSource`."""
        self._checkpoint.ignore(self._place(name).name)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        place = self._place(name)
        if place.num_rows is None:
            tensor = self._checkpoint.tensor(place.name, shape)
        else:
            whole = self._checkpoint.tensor(place.name, (place.num_rows, *shape[1:]))
            tensor = whole.narrow(0, place.begin, shape[0])
        self._tell_progress()
        return tensor

    def _tell_progress(self) -> None:
        if self._progress is not None:
            self._progress(*self._checkpoint.progress)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = ConfigFields.read(index).section("weight_map")
        if weight_map is None:
            raise CheckpointError(f"{index}: weight_map is missing")
        paths = [folder / name for name in sorted({str(v) for v in weight_map.values.values()})]
    else:
        paths = [folder / SINGLE_FILE]
    for path in paths:
        if not path.exists():
            others = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {others[0]} is not a format read here" if others else ""
            raise CheckpointError(f"{path} does not exist{hint}: weights must be safetensors")
    return paths


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Names and places of a safetensors file: 8 bytes of length, JSON, then the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"{path} is not a safetensors file, or is cut short")
        raw = file.read(length)
    try:
        header = cast(dict[str, dict[str, object]], json.loads(raw))
        tensors = {
            name: _stored_tensor(path, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    for name, stored in tensors.items():
        if stored.end > size:
            raise CheckpointError(f"{path} is cut short: tensor {name} ends beyond it")
    return tensors


def _stored_tensor(path: Path, entry: dict[str, object], data_start: int) -> StoredTensor:
    begin, end = cast(list[int], entry["data_offsets"])
    shape = tuple(cast(list[int], entry["shape"]))
    return StoredTensor(path, str(entry["dtype"]), shape, data_start + begin, data_start + end)
