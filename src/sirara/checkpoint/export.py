"""A step's weights as a Hugging Face folder of its own, ready for generation.

    pieces (hash checked) ─► one whole tensor at a time ─► safetensors at planned places ─► fsync ─► rename

The folder is complete or not there. Tokenizer and generation files that a run does not keep are added, so
that AutoTokenizer and generate() need nothing else.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sirara.checkpoint.ranges import DTYPES, dtype_name, host_bytes
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.scrub import scrub_pieces
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError, ConfigError
from sirara.pure.layout import whole
from sirara.pure.saveplan import INDEX, PlannedTensor, SavePlan, plan_save, weight_index

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")
FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote (or, dry, would write)."""

    out: Path
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    dtype: str


def export_step(
    snapshot: Snapshot,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    link: bool = False,
    dry_run: bool = False,
) -> Exported:
    """Writes the Hugging Face folder `out` (which must not exist) from one step; every piece is verified.

    Args:  dtype: converts floating weights, from their masters where the step has them.
           link: hard links to the step's own files instead of a copy (same file system, no dtype).
    Raises:  ConfigError when `out` exists; CheckpointError naming a bad piece; StorageError.
    """
    if link and dtype is not None:
        raise ConfigError("a hard link cannot change the dtype; leave out --link or --dtype")
    small = _small_files(snapshot, dtype)
    if link:
        names = [f.name for f in snapshot.manifest.files if f.name.startswith("model") and f.name != INDEX]
        small[INDEX] = (snapshot.path / INDEX).read_bytes()
        size = sum(f.size for f in snapshot.manifest.files if f.name in names)
        plan = None
    else:
        plan = _plan(snapshot, dtype)
        names = [f.name for f in plan.files]
        small[INDEX] = weight_index(plan)
        size = plan.total_bytes
    weights = [t for t in snapshot.manifest.tensors if "/" not in t.name]
    if not weights:
        raise CheckpointError(f"{snapshot.path} holds no weights")
    kinds = sorted({DTYPES[t.dtype] if dtype is None else dtype for t in weights}, key=str)
    done = Exported(
        out=out,
        files=tuple(sorted([*names, *small])),
        tensors=len(weights),
        total_bytes=size + sum(map(len, small.values())),
        dtype=", ".join(str(kind).removeprefix("torch.") for kind in kinds),
    )
    with new_folder(out, dry_run=dry_run) as temp:
        if temp is not None:
            _fill(snapshot, temp, plan, small, names)
    return done


@contextmanager
def new_folder(out: Path, *, dry_run: bool = False) -> Iterator[Path | None]:
    """A temporary folder that becomes `out` at the end, durably; removed when the block fails. None when
    dry."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already", try_="choose another folder, or remove this one")
    if dry_run:
        yield None
        return
    disk = Disk()
    temp = out.absolute().parent / f".{out.name}.tmp-{secrets.token_hex(4)}"
    disk.make_folder(temp)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, temp, ignore_errors=True)
        yield temp
        disk.sync_folder(temp)
        disk.rename(temp, out)
        disk.sync_folder(out.absolute().parent)
        undo.pop_all()


def _plan(snapshot: Snapshot, dtype: torch.dtype | None) -> SavePlan:
    tensors = []
    for t in snapshot.manifest.tensors:
        if "/" not in t.name:
            kind = dtype_name(_target(DTYPES[t.dtype], dtype))
            boxes = {0: (whole(t.shape),)}
            tensors.append(PlannedTensor(name=t.name, dtype=kind, shape=t.shape, boxes=boxes))
    return plan_save(tensors, node_of=lambda rank: rank)


def _target(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and stored.is_floating_point else stored


def _fill(
    snapshot: Snapshot, temp: Path, plan: SavePlan | None, small: dict[str, bytes], names: list[str]
) -> None:
    disk = Disk()
    for name, data in small.items():
        disk.write_file(temp / name, data)
    if plan is not None:
        _write_weights(disk, snapshot, temp, plan)
        return
    for fault in scrub_pieces(snapshot):
        raise fault.error()
    for name in names:
        try:
            os.link(snapshot.path / name, temp / name)
        except OSError:
            # Another file system, or one without links.
            shutil.copyfile(snapshot.path / name, temp / name)


def _write_weights(disk: Disk, snapshot: Snapshot, temp: Path, plan: SavePlan) -> None:
    m = snapshot.manifest
    for file in plan.files:
        path = temp / file.name
        fd = disk.open(path, size=file.size)
        try:
            disk.write(fd, path, [memoryview(file.header(uuid=m.uuid, step=m.step))], 0)
            for entry in file.entries:
                target = DTYPES[entry.dtype]
                stored = DTYPES[m.tensors[m.tensor_index[entry.name]].dtype]
                master = f"{entry.name}/master"
                source = master if target != stored and master in m.tensor_index else entry.name
                data = snapshot.read(source).to(target).reshape(-1)
                disk.write(fd, path, [host_bytes(data).data], file.header_bytes + entry.start)
            disk.fsync(fd, path)
        finally:
            os.close(fd)


def _small_files(snapshot: Snapshot, dtype: torch.dtype | None) -> dict[str, bytes]:
    """config.json (with the new dtype), what else the step keeps beside its weights, and what generation
    needs."""
    small: dict[str, bytes] = {}
    for f in snapshot.manifest.files:
        if not f.name.endswith(".safetensors") and f.name != INDEX:
            small[f.name] = (snapshot.path / f.name).read_bytes()
    if dtype is not None:
        config: dict[str, Any] = json.loads(small.get("config.json", b"{}"))
        name = str(dtype).removeprefix("torch.")
        config |= {key: name for key in ("torch_dtype", "dtype") if key in config} or {"torch_dtype": name}
        small["config.json"] = _json(config)
    return with_generation_files(small)


def with_generation_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """config.json and tokenizer.json with what generation needs beside them; what is there already is kept.

    Args:  files: name -> content of the files beside the weights of a Hugging Face folder.
    """
    small = dict(files)
    config: dict[str, Any] = json.loads(small.get("config.json", b"{}"))
    tokenizer = json.loads(small.get("tokenizer.json", b"{}"))
    end = _end_token(tokenizer)
    if end is not None and config.get("eos_token_id") is None:
        config["eos_token_id"] = end[1]
    small["config.json"] = _json(config)
    if "generation_config.json" not in small:
        kept = {
            k: config[k]
            for k in ("bos_token_id", "eos_token_id", "pad_token_id")
            if config.get(k) is not None
        }
        small["generation_config.json"] = _json({"_from_model_config": True, **kept})
    if tokenizer and "tokenizer_config.json" not in small:
        length = config.get("max_position_embeddings") or config.get("n_positions")
        known = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        known |= {"model_max_length": length} if length else {}
        small["tokenizer_config.json"] = _json(known | ({"eos_token": end[0]} if end else {}))
    return small


def _end_token(tokenizer: dict[str, Any]) -> tuple[str, int] | None:
    """(text, id) of the token that ends a text."""
    added = {t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}
    return next(((name, added[name]) for name in END_TOKENS if name in added), None)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
