"""linear(x, weights): the one place where matrices of a block are multiplied, whole or cut over the tensor axis.

    column    weights cut by output    x whole -> y cut     backward: dx summed over the axis, while dW is made
    row       weights cut by input     x cut -> y summed    backward: dx cut

With sequence parallelism what is whole above is this rank's share of the tokens: it is gathered where all tokens are
needed, and sums are scattered.  A column keeps only its share for backward and gathers it again while dx is made.

Shape letters: T tokens (all leading dims), I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from sirara.model.ops import adds_as_a_sum, product, side_by_side
from sirara.model.split import Axis, Deferral, Pending, Remake, Sink, Wiring

Part = Literal["column", "row"]


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    transposed: bool = False,
    part: Part = "column",
    wiring: Wiring | None = None,
    remake: Remake | None = None,
) -> Tensor:
    """x @ [w0; w1; ...].T + [b0, b1, ...]: several layers with one input as one matrix product.

    Weights are [O, I], or [I, O] when `transposed`, with O in two dims where one tensor holds several side by side.
    Weights that lie one after another in one storage are used as the matrix they are, others are copied side by
    side first; the result's bits are the same.

    part: how they are cut when the wiring has an axis.  remake: how backward gets x, which it does not keep then.
    """
    wiring = wiring or Wiring()
    sink = None if torch.compiler.is_compiling() else wiring.sink
    how = _How(len(weights), transposed, part, wiring.axis, wiring.deferral, sink)
    run = _eagerly if how.axis is not None and torch.compiler.is_compiling() else _Linear.apply
    return run(x, how, remake, *weights, *(biases or ()))


@_disable_dynamo
def _eagerly(x: Tensor, how: "_How", remake: Remake | None, *params: Tensor) -> Tensor:
    # Exchanges cannot be traced: compiled code ends before them and goes on after them.
    return _Linear.apply(x, how, remake, *params)


@dataclass(frozen=True, slots=True)
class _How:
    n: int
    transposed: bool
    part: Part
    axis: Axis | None
    deferral: Deferral | None
    sink: Sink | None

    def spread(self, part: Part) -> bool:
        """Whether this layer is cut as `part` and tokens lie spread over the axis."""
        return self.axis is not None and self.part == part and self.axis.sequence


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _How, remake: Remake | None, *params: Tensor) -> Tensor:
        ctx.how, ctx.make = how, None if remake is None else remake.make
        ctx.at_once = remake is not None and remake.at_once
        ctx.x_shape, ctx.count = x.shape, len(params)
        ctx.save_for_backward(*params, *((x,) if remake is None else remake.tensors))
        axis, column = how.axis, how.part == "column"
        weights, biases = params[: how.n], params[how.n :]
        x_TI = x.reshape(-1, x.shape[-1])
        if axis is not None and how.spread("column"):
            x_TI = axis.gather_tokens(x_TI).wait()
        w_OI = _matrix(weights, how.transposed)
        # The bias of a row is added once, by the first rank.
        biased = bool(biases) and (axis is None or column or axis.rank == 0)
        y_TO = product(x_TI, w_OI.t(), side_by_side([_flat(b) for b in biases], 0) if biased else None)
        if how.spread("column"):
            return y_TO
        if axis is not None and how.spread("row"):
            return axis.scatter_sum(y_TO).wait()
        if axis is not None and not column:
            y_TO = axis.sum(y_TO).wait()
        return y_TO.view(*x.shape[:-1], w_OI.shape[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        axis, deferral, needed = how.axis, how.deferral, ctx.needs_input_grad
        params, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        dy = own_dy = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1])
        if axis is not None and how.spread("row"):
            dy = axis.gather_tokens(own_dy).wait()
        rest = _WeightGradients(how, params, needed[3:], ctx.make, ctx.at_once, kept, dy, own_dy)
        deferred = deferral is not None and deferral.active
        grads: Sequence[Tensor | None] = [None] * ctx.count
        if any(needed[3:]) and not deferred:
            rest.begin()
        dx: Tensor | None = None
        coming: Pending | None = None
        if needed[0]:
            dx = product(dy, _matrix(params[: how.n], how.transposed))
            if axis is not None and how.part == "column":
                rest.arrive()
                coming = axis.scatter_sum(dx) if axis.sequence else axis.sum(dx)
        if any(needed[3:]):
            if deferral is not None and deferred:
                deferral.keep(rest.detached())
            else:
                grads = rest.make_all()
        if coming is not None:
            dx = coming.wait()
        return (None if dx is None else dx.view(ctx.x_shape), None, None, *grads)


@dataclass(slots=True)
class _WeightGradients:
    """What a layer's weight gradients are made from; a `Job` when it is kept for later."""

    how: _How
    params: Sequence[Tensor]
    wanted: Sequence[bool]
    make: Callable[..., Tensor] | None
    at_once: bool
    kept: Sequence[Tensor]
    dy_TO: Tensor
    own_dy_SO: Tensor
    x_TI: Tensor | None = None
    coming: Pending | None = None

    def begin(self) -> None:
        """Makes x, or starts gathering it."""
        x = self.kept[0] if self.make is None else self.make(*self.kept)
        self.x_TI = x.reshape(-1, x.shape[-1])
        if self.how.axis is not None and self.how.spread("column"):
            self.coming = self.how.axis.gather_tokens(self.x_TI)

    def arrive(self) -> None:
        """Waits for x if it was started: exchanges are waited for in the order in which they begin."""
        if self.coming is not None:
            self.x_TI, self.coming = self.coming.wait(), None

    def make_all(self) -> list[Tensor | None]:
        """The gradients, shaped as their leaves, in the order of `params`."""
        self.arrive()
        n, dim = self.how.n, 1 if self.how.transposed else 0
        weights, biases = self.params[:n], self.params[n:]
        grads: list[Tensor | None] = [None] * len(self.params)
        if self.x_TI is not None and any(self.wanted[:n]):
            a, b = (self.x_TI, self.dy_TO) if self.how.transposed else (self.dy_TO, self.x_TI)
            places = self._written(weights, a.t(), b)
            if places is None:
                parts = product(a.t(), b).split([w.numel() // self.x_TI.shape[1] for w in weights], dim)
                places = [g.view(w.shape) for g, w in zip(parts, weights, strict=True)]
            grads[:n] = places
        if any(self.wanted[n:]):
            parts = self.own_dy_SO.sum(0).split([b.numel() for b in biases])
            grads[n:] = [g.view(b.shape) for g, b in zip(parts, biases, strict=True)]
        return grads

    def _written(self, weights: Sequence[Tensor], a_OT: Tensor, b_TI: Tensor) -> Sequence[Tensor] | None:
        """The gradients where the sink wants them; None when it does not, or not as one matrix in memory."""
        sink = self.how.sink
        if sink is None or not all(self.wanted[: len(weights)]) or (self.how.transposed and len(weights) > 1):
            return None
        places = sink.places(weights, onto=False)
        onto = places is None and adds_as_a_sum(a_OT, b_TI)
        if onto:
            places = sink.places(weights, onto=True)
        if places is None or any(p.dim() != 2 or not p.is_contiguous() for p in places):
            return None
        one = side_by_side(places, 0)
        if one.data_ptr() != places[0].data_ptr():
            return None
        product(a_OT, b_TI, onto=one) if onto else product(a_OT, b_TI, out=one)
        return places

    def detached(self) -> "_WeightGradients":
        """Kept for later, when ZeRO may have let the weights go: the few elements of a norm are copied, what is made
        with matrices is made now."""
        if self.at_once:
            self.begin()
            self.make, self.kept = None, ()
        elif self.make is not None:
            self.kept = [t.clone() if t.dim() == 1 else t for t in self.kept]
        return self

    def run(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(leaf, gradient) of each leaf that wants one."""
        if self.x_TI is None:
            self.begin()
        for leaf, wanted, grad in zip(self.params, self.wanted, self.make_all(), strict=True):
            if wanted and grad is not None:
                yield leaf, grad


def _flat(bias: Tensor) -> Tensor:
    return bias if bias.dim() == 1 else bias.reshape(-1)


def _matrix(weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """[O, I] of all layers together."""
    if transposed:
        return side_by_side([w if w.dim() == 2 else w.flatten(1) for w in weights], 1).t()
    return side_by_side([w if w.dim() == 2 else w.flatten(0, -2) for w in weights], 0)
