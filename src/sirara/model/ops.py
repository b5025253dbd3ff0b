"""The arithmetic of a block: products, norms, activations; each keeps little and passes over memory few times.

Every function here gives equal bits for any number of threads, as far as the matrix library does: torch's sums
over tokens in the norms' own backward, long matrix products and what falls on the border between two threads'
elements do not (see `product` and `elementwise`). oneDNN's bf16 products do so only at some sizes.

Shape letters: T tokens (all leading dims), D features, I inputs, O outputs, F ffn.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SPAN_ELEMENTS = 1 << 19
_VECTOR = 64
_TORCH_GRAIN = 32_768
_LOW = (torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32 inside for lower dtypes."""
    return _RmsNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim."""
    return _LayerNorm.apply(x, weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, where x = [gate | up] along the last dim."""
    return _SwiGlu.apply(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, as in GPT-2 and BLOOM."""
    return _GeluTanh.apply(x)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of values of `dtype` are made."""
    return torch.float32 if dtype in _LOW else dtype


def spans(rows: int, width: int, device: torch.device) -> list[tuple[int, int]]:
    """Row ranges whose temporaries fit a CPU's cache; one range on other devices and while compiling."""
    if device.type != "cpu" or _compiling():
        return [(0, rows)]
    # A function of the width alone: partial sums must not depend on how many rows or threads there are.
    step = max(16, _SPAN_ELEMENTS // width // 16 * 16)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def elementwise(function: Callable[..., Tensor], out_RC: Tensor, *inputs_RC: Tensor) -> Tensor:
    """Writes function(*inputs, out=...) into out_RC, a matrix; equal bits for any number of threads.

    torch deals elements out to threads evenly and computes what does not fill a vector at the end of a thread's
    share by other instructions, whose exp and tanh differ in the last bit.  Here every share is a number of whole
    rows and of whole vectors; what is left over is too small to be dealt out.
    """
    for piece in _even_pieces(out_RC):
        function(*(x[piece] for x in inputs_RC), out=out_RC[piece])
    return out_RC


def product(
    a_MK: Tensor,
    b_KN: Tensor,
    bias_N: Tensor | None = None,
    *,
    onto: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """a @ b + bias, or onto += a @ b; equal bits for any number of threads.  out: where a @ b is written.

    MKL deals a long K out to threads, so a K that is long for its M and N is added up in pieces of a fixed length.
    """
    inner, least = a_MK.shape[1], min(a_MK.shape[0], b_KN.shape[1])
    step = inner
    if a_MK.device.type == "cpu" and a_MK.dtype not in _LOW and least >= 16 and inner and not _compiling():
        # In float64 MKL begins to deal K out earlier, x @ x.T first.
        longest = max(192, least) if a_MK.dtype == torch.float64 else max(256, 4 * least)
        step = -(-inner // -(-inner // longest))
    first, second = (a_MK, b_KN) if step == inner else (a_MK[:, :step], b_KN[:step])
    if onto is not None:
        y_MN = onto.addmm_(first, second)
    else:
        y_MN = torch.mm(first, second, out=out) if bias_N is None else torch.addmm(bias_N, first, second)
    for low in range(step, inner, step or 1):
        y_MN.addmm_(a_MK[:, low : low + step], b_KN[low : low + step])
    return y_MN


def adds_as_a_sum(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether `product(a, b, onto=c)` has the bits of c + product(a, b), for matrices of this form here and now.

    So it is where the library holds the whole sum over K in registers before it adds; which K that is, it does not
    tell, so it is tried once per form.  Never for a lower dtype, whose c is rounded differently.
    """
    if a_MK.device.type != "cpu" or a_MK.dtype in _LOW or _compiling():
        return False
    form = (a_MK.shape[0], a_MK.shape[1], b_KN.shape[1], a_MK.stride(1) != 1, b_KN.stride(1) != 1)
    return _tried(form, a_MK.dtype, torch.get_num_threads())


@lru_cache(maxsize=1024)
def _tried(form: tuple[int, int, int, bool, bool], dtype: torch.dtype, threads: int) -> bool:
    m, k, n, a_turned, b_turned = form
    generator = torch.Generator().manual_seed(k)

    def drawn(rows: int, columns: int, turned: bool) -> Tensor:
        if turned:
            return torch.randn(columns, rows, dtype=dtype, generator=generator).t()
        return torch.randn(rows, columns, dtype=dtype, generator=generator)

    a_MK, b_KN, c_MN = drawn(m, k, a_turned), drawn(k, n, b_turned), drawn(m, n, False)
    return torch.equal(c_MN + product(a_MK, b_KN), product(a_MK, b_KN, onto=c_MN.clone()))


def side_by_side(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The tensors concatenated along `dim`: a view when they already lie so in memory (dim 0 only)."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if dim == 0 and not _compiling():
        end = first.storage_offset()
        storage = first.untyped_storage().data_ptr()
        for t in tensors:
            if (
                t.storage_offset() != end
                or t.untyped_storage().data_ptr() != storage
                or not t.is_contiguous()
            ):
                break
            end += t.numel()
        else:
            rows = sum(t.shape[0] for t in tensors)
            return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat(list(tensors), dim)


def _even_pieces(x_RC: Tensor) -> list[tuple[slice, slice]]:
    rows, width = x_RC.shape
    most = torch.get_num_threads()
    if rows * width < _TORCH_GRAIN or most == 1 or x_RC.device.type != "cpu":
        return [(slice(0, rows), slice(0, width))]
    unit = _VECTOR // math.gcd(_VECTOR, width)
    even = 0
    for threads in range(min(most, -(-rows * width // _TORCH_GRAIN)), 1, -1):
        even = rows // (threads * unit) * (threads * unit)
        if even and min(most, -(-even * width // _TORCH_GRAIN)) == threads:
            break
    else:
        even = 0
    pieces = [(slice(0, even), slice(0, width))] if even else []
    step = max(unit, (_TORCH_GRAIN - 1) // width // unit * unit)
    columns = width if step * width < _TORCH_GRAIN else _TORCH_GRAIN // 2
    for low in range(even, rows, step):
        for left in range(0, width, columns):
            pieces.append((slice(low, min(rows, low + step)), slice(left, min(width, left + columns))))
    return pieces


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        x_TD = x.reshape(-1, d)
        dtype = wide(x.dtype)
        w_D = weight_D.to(dtype)
        y_TD = torch.empty_like(x_TD)
        r_T1 = torch.empty(x_TD.shape[0], 1, dtype=dtype, device=x.device)
        for low, high in spans(x_TD.shape[0], d, x.device):
            part = x_TD[low:high].to(dtype)
            size = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
            r_T1[low:high] = (size * size / d + eps).rsqrt_()
            if x.dtype == dtype:
                torch.mul(part, r_T1[low:high], out=y_TD[low:high]).mul_(w_D)
            else:
                y_TD[low:high] = part.mul_(r_T1[low:high]).mul_(w_D)
        ctx.save_for_backward(x, weight_D, r_T1)
        return y_TD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight_D, r_T1 = ctx.saved_tensors
        dtype, d = r_T1.dtype, x.shape[-1]
        x_TD, dy_TD, w_D = x.reshape(-1, d), dy.reshape(-1, d), weight_D.to(r_T1.dtype)
        dx_TD = torch.empty_like(x_TD)
        dw_D = torch.zeros(d, dtype=dtype, device=x.device)
        for low, high in spans(x_TD.shape[0], d, x.device):
            r = r_T1[low:high]
            part, dpart = x_TD[low:high].to(dtype), dy_TD[low:high].to(dtype)
            t = (dpart * part).mul_(r)
            dw_D += t.sum(0)
            # dx = r * (w dy - x r^2 mean(w dy x))
            pull = t.mul_(w_D).sum(-1, keepdim=True).mul_(r * r / d)
            t = torch.mul(dpart, w_D, out=t).mul_(r)
            if x.dtype == dtype:
                torch.addcmul(t, part, pull, value=-1, out=dx_TD[low:high])
            else:
                dx_TD[low:high] = t.addcmul_(part, pull, value=-1)
        return dx_TD.view(x.shape), dw_D.to(weight_D.dtype), None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], weight_D, bias_D, eps)
        ctx.save_for_backward(x, weight_D, bias_D, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight_D, bias_D, mean, rstd = ctx.saved_tensors
        d = x.shape[-1]
        dy = dy.contiguous()
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, [d], mean, rstd, weight_D, bias_D, [True, False, False]
        )
        dtype = wide(x.dtype)
        x_TD, dy_TD = x.reshape(-1, d), dy.reshape(-1, d)
        mean_T1, rstd_T1 = mean.reshape(-1, 1).to(dtype), rstd.reshape(-1, 1).to(dtype)
        dw_D = torch.zeros(d, dtype=dtype, device=x.device)
        db_D = torch.zeros_like(dw_D)
        for low, high in spans(x_TD.shape[0], d, x.device):
            dpart = dy_TD[low:high].to(dtype)
            db_D += dpart.sum(0)
            t = (x_TD[low:high].to(dtype) - mean_T1[low:high]).mul_(rstd_T1[low:high])
            dw_D += t.mul_(dpart).sum(0)
        return dx, dw_D.to(weight_D.dtype), db_D.to(bias_D.dtype), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        x_TF = x.reshape(-1, x.shape[-1])
        width = x.shape[-1] // 2
        gate, up = x_TF.split(width, -1)
        y_TF = functional.silu(gate) if _compiling() else elementwise(_silu, x.new_empty(up.shape), gate)
        return y_TF.mul_(up).view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (dy,) = grad_outputs
        (x,) = ctx.saved_tensors
        width = x.shape[-1] // 2
        x_TF, dy_TF = x.reshape(-1, 2 * width), dy.reshape(-1, width)
        gate, up = x_TF.split(width, -1)
        if _compiling():
            dgate = torch.ops.aten.silu_backward(dy_TF * up, gate)
            return torch.cat((dgate, functional.silu(gate) * dy_TF), -1).view(x.shape)
        dx_TF = torch.empty_like(x_TF)
        dgate, dup = dx_TF.split(width, -1)
        # dup holds d silu(gate) first, so that no temporary is needed.
        torch.mul(dy_TF, up, out=dup)
        elementwise(_silu_backward, dgate, dup, gate)
        elementwise(_silu, dup, gate).mul_(dy_TF)
        return dx_TF.view(x.shape)


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if _compiling():
            return functional.gelu(x, approximate="tanh")
        x_TF = x.reshape(-1, x.shape[-1])
        return elementwise(_gelu, torch.empty_like(x_TF), x_TF).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (dy,) = grad_outputs
        (x,) = ctx.saved_tensors
        if _compiling():
            return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        x_TF, dy_TF = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
        return elementwise(_gelu_backward, torch.empty_like(x_TF), dy_TF, x_TF).view(x.shape)


def _silu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.ops.aten.silu.out(x, out=out)


def _silu_backward(dy: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=out)


def _gelu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def _gelu_backward(dy: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out)


def _compiling() -> bool:
    return torch.compiler.is_compiling()
