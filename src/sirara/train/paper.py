"""Lets a training step run on meta tensors: quickly, and although it reads a few values.

    read by the host          loss, norms, flags: zero; but what the host has sent there is what it was
    searched (nonzero)        every element is found, the most that can be
    computed                  the first time by torch's meta kernels, which check it; then by what came out of them

torch's meta kernels are Python and take 0.1 ms each.  What an operator gives back is a function of shapes, strides and
dtypes, and a step asks the same of it hundreds of times.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
META = torch.device("meta")

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


@dataclass(frozen=True, slots=True)
class _Nature:
    """What an operator does to its arguments; `written`: place and name of the one that it writes to and returns.

    known: its result follows from the forms of its arguments.
    """

    known: bool
    written: tuple[int, str] | None = None
    returns_none: bool = False


class _Unknown(Exception):
    """An argument that says nothing about the result, or one that is not on paper."""


class OnPaper(TorchDispatchMode):
    """While it is entered, programs run on meta tensors: see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._natures: dict[Any, _Nature] = {}
        self._results: dict[Hashable, list[_Form] | _Form | None] = {}
        # By storage, with the meta tensor, whose storage must live as long as its number stands here.
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is _ATEN._to_copy.default and "device" in options:
            there = options["device"]
            if there is not None and torch.device(there).type != args[0].device.type:
                moved = self._read(args[0]) if args[0].is_meta else self._send(args[0])
                return moved.to(options.get("dtype") or moved.dtype)
        elif func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return 0
        elif func is _ATEN.nonzero.default and args[0].is_meta:
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=META)
        nature = self._natures.get(func)
        if nature is None:
            nature = self._natures[func] = _nature(func)
        return self._remembered(func, nature, args, options) if nature.known else func(*args, **options)

    def _send(self, host: Tensor) -> Tensor:
        """The tensor on paper; its values are kept, for whoever reads them again."""
        paper = torch.empty(host.shape, dtype=host.dtype, device=META)
        self._sent[paper.untyped_storage()._cdata] = (paper, host.contiguous())
        return paper

    def _read(self, paper: Tensor) -> Tensor:
        sent = self._sent.get(paper.untyped_storage()._cdata)
        if sent is None or sent[1].dtype != paper.dtype:
            return torch.zeros(paper.shape, dtype=paper.dtype)
        return sent[1].as_strided(paper.shape, paper.stride(), paper.storage_offset())

    def _remembered(
        self, func: Any, nature: _Nature, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        try:
            key = (func, _key(args), _key(tuple(options.items())) if options else None)
        except _Unknown:
            return func(*args, **options)
        if key not in self._results:
            made = func(*args, **options)
            self._remember(key, made, nature)
            return made
        if nature.written is not None:
            at, name = nature.written
            return options[name] if name in options else args[at]
        forms = self._results[key]
        if isinstance(forms, _Form):
            return forms.make()
        return None if forms is None else tuple(form.make() for form in forms)

    def _remember(self, key: Hashable, made: Any, nature: _Nature) -> None:
        if nature.written is not None or nature.returns_none:
            self._results[key] = None
        elif isinstance(made, Tensor) and made.is_meta:
            self._results[key] = _form(made)
        elif isinstance(made, tuple) and all(isinstance(m, Tensor) and m.is_meta for m in made):
            self._results[key] = [_form(m) for m in made]


def _nature(func: Any) -> _Nature:
    schema = func._schema
    written = [(n, a.name) for n, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    aliases = [r.alias_info for r in schema.returns]
    if not written:
        # Views share memory, and they are quick.
        return _Nature(known=bool(aliases) and not any(aliases))
    if not aliases:
        return _Nature(known=True, returns_none=True)
    alone = len(written) == len(aliases) == 1 and "List" not in str(schema.returns[0].type)
    return _Nature(known=alone, written=written[0] if alone else None)


def _key(value: Any) -> Hashable:
    """All that a result hangs on.  1, 1.0 and True are different."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise _Unknown
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_key(v) for v in value)
    if isinstance(value, bool | int | float):
        return (type(value), value)
    if value is None or isinstance(
        value, str | torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return value
    raise _Unknown


def _form(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)
