"""Reed-Solomon at the speed of memory: ISA-L through ctypes, numpy where it is not installed.

The library comes with the wheel of pyeclib (pip install 'sirara[parity]') or from the system (libisal2). Both ways
make the bytes of `pure.erasure`. Calls release the GIL and copy nothing.
"""

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sirara.errors import InvariantError
from sirara.pure import erasure

_log = logging.getLogger("sirara")
_TABLE_BYTES = 32  # per coefficient
_SYSTEM = ("libisal.so.2", "libisal.so")
_FUNCTIONS = ("ec_init_tables", "ec_encode_data", "ec_encode_data_update")
Bytes = memoryview | np.ndarray


def combine(matrix_nk: np.ndarray, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
    """targets = matrix times sources; all are stretches of equal length, targets are overwritten."""
    sources_, targets_ = [_array(s) for s in sources], [_array(t) for t in targets]
    _check(matrix_nk, sources_, targets_)
    library = _library()
    if library is None:
        for target, made in zip(targets_, erasure.combine(matrix_nk, sources_), strict=True):
            target[:] = made
    elif targets_ and sources_ and len(targets_[0]):
        n, k = matrix_nk.shape
        library.ec_encode_data(
            len(targets_[0]), k, n, _tables(matrix_nk.tobytes(), k), _pointers(sources_), _pointers(targets_)
        )


def encode_update(coefficient: int, block: Bytes, target: Bytes) -> None:
    """target += coefficient * block: one block of data added to one of parity, in any order."""
    source, sink = _array(block), _array(target)
    _check(np.array([[coefficient]], np.uint8), [source], [sink])
    library = _library()
    if library is None:
        erasure.add_product(coefficient, source, sink)
    elif len(source):
        library.ec_encode_data_update(
            len(source), 1, 1, 0, _tables(bytes([coefficient]), 1), _pointer(source), _pointers([sink])
        )


def is_fast() -> bool:
    """Whether ISA-L was found."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    for path in (*_bundled(), *_SYSTEM):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if all(hasattr(library, name) for name in _FUNCTIONS):
            return library
    _log.warning("ISA-L is not installed, parity is computed by numpy: pip install 'sirara[parity]'")
    return None


def _bundled() -> list[Path]:
    found = importlib.util.find_spec("pyeclib")
    if found is None or found.origin is None:
        return []
    return sorted((Path(found.origin).parent.parent / "pyeclib.libs").glob("libisal*.so*"))


@functools.lru_cache(maxsize=512)
def _tables(matrix: bytes, k: int) -> ctypes.Array[ctypes.c_char]:
    library = _library()
    tables = ctypes.create_string_buffer(_TABLE_BYTES * len(matrix))
    if library is not None:
        library.ec_init_tables(k, len(matrix) // k, matrix, tables)
    return tables


def _array(stretch: Bytes) -> np.ndarray:
    return stretch if isinstance(stretch, np.ndarray) else np.frombuffer(stretch, np.uint8)


def _check(matrix_nk: np.ndarray, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
    lengths = {len(a) for a in (*sources, *targets)}
    plain = all(a.dtype == np.uint8 and a.ndim == 1 and a.flags.c_contiguous for a in (*sources, *targets))
    if matrix_nk.shape != (len(targets), len(sources)) or len(lengths) > 1 or not plain:
        raise InvariantError(
            f"a matrix of shape {matrix_nk.shape} cannot make {len(targets)} of {len(sources)} blocks",
            why=f"lengths {sorted(lengths)}; plain bytes are needed",
        )
    if not all(t.flags.writeable for t in targets):
        raise InvariantError("parity cannot be written to memory that is read-only")


def _pointer(a: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(a.ctypes.data)


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
