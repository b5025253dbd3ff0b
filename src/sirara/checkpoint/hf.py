"""Hugging Face model folders: config.json and whole tensors in safetensors files, read and written in pieces.

    8 bytes: N | N bytes of JSON: {name: {dtype, shape, data_offsets}} | tensor | tensor | ...

Nothing here holds a model: the reader hands out slices of one tensor, the planner computes every byte
position from names, shapes and the dtype alone (so that many writers can write one file), the writer takes
one tensor at a time.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sirara.errors import CheckpointError, InvariantError, StorageError
from sirara.pure.families import ModelShape, TensorSpec, unit_specs
from sirara.pure.hf_config import config_from_shape, shape_from_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000

_CODES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}
_CHUNK = 1 << 24
# Buffers that old versions of transformers stored beside the weights; the model computes them.
_STALE_BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a whole tensor lies: [start, start + nbytes) of a file, in C order."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file before it is written: its first bytes, its tensors, its length."""

    file: str
    header: bytes
    tensors: tuple[StoredTensor, ...]
    nbytes: int


def hf_config(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The config.json with which transformers loads the model."""
    return config_from_shape(
        shape,
        dtype=str(dtype).removeprefix("torch."),
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def plan_shards(
    specs: Iterable[TensorSpec], dtype: torch.dtype, max_shard_bytes: int = SHARD_BYTES
) -> tuple[Shard, ...]:
    """The files of a model, byte for byte except for the values; a tied tensor is stored once, by its owner.

    A file is closed before it would exceed `max_shard_bytes`; a larger tensor has a file of its own.
    """
    bins: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if spec.tied_to is not None:
            continue
        nbytes = prod(spec.shape) * dtype.itemsize
        if bins[-1] and filled + nbytes > max_shard_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(spec)
        filled += nbytes
    n = len(bins)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return tuple(_shard(file, content, dtype) for file, content in zip(names, bins, strict=True))


def index_json(shards: Sequence[Shard]) -> bytes | None:
    """The content of `model.safetensors.index.json`; None when there is one file, which needs no index."""
    if len(shards) == 1:
        return None
    total = sum(t.nbytes for shard in shards for t in shard.tensors)
    files = {t.name: shard.file for shard in shards for t in shard.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2).encode() + b"\n"


def write_hf(
    folder: Path,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers loads, from (name, tensor) pairs in any order, one at a time.

    Values are converted to `dtype`. config.json is written last: a folder without it is not complete.

    Raises: CheckpointError when a tensor is missing, unknown or of another shape; StorageError for I/O.
    """
    shards = plan_shards((t for u in unit_specs(shape) for t in u.tensors), dtype, max_shard_bytes)
    places = {t.name: t for shard in shards for t in shard.tensors}
    aliases = {t.name for u in unit_specs(shape) for t in u.tensors if t.tied_to is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for shard in shards:
            with (folder / shard.file).open("wb") as out:
                out.write(shard.header)
                out.truncate(shard.nbytes)
        for name, tensor in tensors:
            if name in aliases:
                continue
            _write_tensor(folder, _claim(places, name, tuple(tensor.shape)), tensor)
        if places:
            raise CheckpointError(f"{len(places)} tensors were not given: {_some(places)}", where=str(folder))
        for shard in shards:
            _sync(folder / shard.file)
        index = index_json(shards)
        if index is not None:
            _write_file(folder / INDEX, index)
        text = json.dumps(hf_config(shape, dtype) if config is None else dict(config), indent=2)
        _write_file(folder / "config.json", text.encode() + b"\n")
    except OSError as e:
        raise StorageError(f"cannot write the model to {folder}: {e.strerror or e}", where=str(folder)) from e


class HfReader:
    """A Hugging Face folder: its shape, and its tensors slice by slice, under the names of `unit_specs`.

    Only headers are read at first; they are checked against the files and against config.json.

    Raises: ConfigError for a config.json that is not supported; CheckpointError for files or tensors that are
            missing, unexpected, of another shape, or torn.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = _read_json(self.folder / "config.json")
        self.shape = shape_from_config(self.config)
        self.specs = {t.name: t for u in unit_specs(self.shape) for t in u.tensors}
        stored = {_full_name(self.shape, self.specs, t.name): t for t in _stored_tensors(self.folder)}
        self.tensors = self._checked(stored)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the tensor (or the owner of a tied one) is stored."""
        return self.tensors[self._owner(name)].dtype

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in C order, 1-D, in the stored dtype; of a tied tensor, its owner's."""
        numel = prod(self.specs[name].shape)
        if not 0 <= start <= stop <= numel:
            raise InvariantError(f"elements {start} to {stop} were asked of {name}, which has {numel}")
        return _read(self.folder, self.tensors[self._owner(name)], start, stop)

    def slices(self, name: str, elements: int = _CHUNK) -> Iterator[tuple[int, Tensor]]:
        """The whole tensor as (start, slice) of at most `elements` elements."""
        for start in range(0, prod(self.specs[name].shape), elements):
            stop = min(start + elements, prod(self.specs[name].shape))
            yield start, self.read_slice(name, start, stop)

    def _owner(self, name: str) -> str:
        return self.specs[name].tied_to or name

    def _checked(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        owned = {name: spec for name, spec in self.specs.items() if spec.tied_to is None}
        missing = [name for name in owned if name not in stored]
        if missing:
            advice = ["tie_word_embeddings=true in config.json"] if missing == ["lm_head.weight"] else []
            raise CheckpointError(
                f"{len(missing)} tensors are missing: {_some(missing)}", where=str(self.folder), try_=advice
            )
        unexpected = [n for n in stored if n not in self.specs and not _STALE_BUFFERS.search(n)]
        if unexpected:
            raise CheckpointError(
                f"{len(unexpected)} tensors do not belong to the model: {_some(unexpected)}",
                where=str(self.folder),
                why=f"config.json describes a {self.shape.family} model without them",
            )
        for name, spec in self.specs.items():
            if name in stored and stored[name].shape != spec.shape:
                raise CheckpointError(
                    f"{name} has shape {list(stored[name].shape)}, config.json asks for {list(spec.shape)}",
                    where=str(self.folder / stored[name].file),
                )
        for name, spec in self.specs.items():
            if spec.tied_to is not None and name in stored:
                self._check_tie(stored[name], stored[spec.tied_to])
        return {name: stored[name] for name in owned}

    def _check_tie(self, second: StoredTensor, owner: StoredTensor) -> None:
        n = prod(owner.shape)
        for start in range(0, n, _CHUNK):
            stop = min(n, start + _CHUNK)
            a, b = _read(self.folder, second, start, stop), _read(self.folder, owner, start, stop)
            if a.dtype != b.dtype or not torch.equal(a, b):
                raise CheckpointError(
                    f"{second.name} and {owner.name} have different values, but config.json ties them",
                    where=str(self.folder),
                    try_=["tie_word_embeddings=false in config.json keeps both"],
                )


def load_tensors(reader: HfReader, target: Callable[[TensorSpec], Tensor], *, elements: int = _CHUNK) -> None:
    """Fill `target(spec)`, a contiguous tensor of any dtype, for every spec that owns its values."""
    for spec in reader.specs.values():
        if spec.tied_to is None:
            flat = target(spec).detach().view(-1)
            for start, piece in reader.slices(spec.name, elements):
                flat[start : start + piece.numel()].copy_(piece)


def _shard(file: str, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        nbytes = prod(spec.shape) * dtype.itemsize
        entries[spec.name] = {
            "dtype": _CODE_OF[dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8 keep every tensor aligned, as safetensors itself does.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors = tuple(
        _stored(file, name, entry, len(header)) for name, entry in entries.items() if name != "__metadata__"
    )
    return Shard(file=file, header=header, tensors=tensors, nbytes=len(header) + at)


def _stored(file: str, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    low, high = entry["data_offsets"]
    return StoredTensor(
        name=name,
        file=file,
        dtype=_CODES[entry["dtype"]],
        shape=tuple(entry["shape"]),
        start=data_start + low,
        nbytes=high - low,
    )


def _stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Every tensor of the folder's files, from their headers."""
    if (folder / INDEX).exists():
        files = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
        absent = [f for f in files if not (folder / f).exists()]
        if absent or not files:
            raise CheckpointError(
                f"{INDEX} names {len(files)} files, {len(absent)} are missing: {_some(absent)}",
                where=str(folder),
                try_=["download the folder again"],
            )
    elif (folder / SINGLE).exists():
        files = [SINGLE]
    else:
        raise _no_weights(folder)
    for file in files:
        yield from _read_header(folder, file)


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickles:
        return CheckpointError(
            f"{folder} has weights only as {_some(pickles)}, which is refused",
            why="these files are pickles: loading one runs whatever code it contains",
            try_=["where you trust it, load it with transformers and save_pretrained() it as safetensors"],
        )
    return CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}")


def _read_header(folder: Path, file: str) -> list[StoredTensor]:
    path = folder / file
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{file} is torn: its header would be {length} bytes, the file has {size}", where=str(path)
            )
        try:
            entries = json.loads(f.read(length))
        except ValueError as e:
            raise CheckpointError(f"{file} is not a safetensors file: {e}", where=str(path)) from e
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in _CODES and not _STALE_BUFFERS.search(name):
            raise CheckpointError(
                f"{name} is stored as {entry['dtype']}", where=str(path), why=f"readable: {', '.join(_CODES)}"
            )
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size:
        raise CheckpointError(
            f"{file} is torn: its header speaks of {end} bytes, the file has {size}",
            where=str(path),
            try_=["copy or download the file again"],
        )
    known = ((name, entry) for name, entry in entries.items() if entry["dtype"] in _CODES)
    return [_stored(file, name, entry, 8 + length) for name, entry in known]


def _full_name(shape: ModelShape, specs: Mapping[str, TensorSpec], name: str) -> str:
    """Folders saved from the base model (`GPT2Model`) leave out its prefix."""
    with_prefix = shape.traits.base_prefix + name
    return with_prefix if name not in specs and with_prefix in specs else name


def _read(folder: Path, tensor: StoredTensor, start: int, stop: int) -> Tensor:
    out = torch.empty(stop - start, dtype=tensor.dtype)
    raw = out.view(torch.uint8).numpy().data
    at = tensor.start + start * tensor.dtype.itemsize
    with (folder / tensor.file).open("rb", buffering=0) as f:
        while raw:
            got = os.preadv(f.fileno(), [raw], at)
            if got == 0:
                raise CheckpointError(f"{tensor.file} ends inside {tensor.name}", where=str(folder))
            raw, at = raw[got:], at + got
    return out


def _claim(places: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> StoredTensor:
    if name not in places:
        raise CheckpointError(f"{name} is given twice or does not belong to the model")
    place = places.pop(name)
    if place.shape != shape:
        raise CheckpointError(f"{name} has the shape {list(shape)}, the model asks for {list(place.shape)}")
    return place


def _write_tensor(folder: Path, place: StoredTensor, tensor: Tensor) -> None:
    flat = tensor.detach().reshape(-1)
    with (folder / place.file).open("r+b", buffering=0) as out:
        for start in range(0, flat.numel(), _CHUNK):
            piece = flat[start : start + _CHUNK].to("cpu", place.dtype).contiguous()
            raw = piece.view(torch.uint8).numpy().data
            at = place.start + start * place.dtype.itemsize
            while raw:
                put = os.pwrite(out.fileno(), raw, at)
                raw, at = raw[put:], at + put


def _write_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise CheckpointError(f"{path.parent} has no {path.name}", where=str(path.parent)) from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path.name} cannot be read: {e}", where=str(path)) from e
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path))
    return content


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
