"""Token losses of an output projection, without the logits of the whole batch ever existing.

    tokens    | chunk 0 | chunk 1 | ...      logits of one chunk: LOGITS_BYTES or CHUNK_TOKENS
    logits -> losses, d logits (in their place) -> dx of the chunk, dW added up

Gradients are made in forward, when the logits are there, and handed out in backward; where backward is split, dW of the
last chunk is put off until its second half, and these d logits are kept instead.  Where the vocabulary is cut
over an axis, ranks tell each other three numbers per token of a chunk; dx is summed while the last dW is made.

Shape letters: T tokens, D model, V vocabulary, N rows of this rank's part of it, R ranks, S = T / R or T tokens of x.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sirara.model.ops import elementwise, product, spans, wide
from sirara.model.split import Axis, Deferral, Pending

LOGITS_BYTES = 24 << 20
# Every chunk passes over dW, which is larger than the logits of a few tokens when the vocabulary is large.
CHUNK_TOKENS = 256
NO_TARGET = -100


def token_losses(
    x_SD: Tensor,
    weight_ND: Tensor,
    targets_T: Tensor,
    scale: float,
    *,
    smoothing: float = 0.0,
    vocab: int | None = None,
    axis: Axis | None = None,
    deferral: Deferral | None = None,
) -> tuple[Tensor, Tensor]:
    """(objective, losses_T): losses in fp32 (fp64 for fp64), 0 without a target, detached.

    The objective's gradient is that of scale * sum(losses).

    Args:  smoothing: that much of the target is spread evenly over the vocabulary.
           vocab, axis: the weight is rows rank * ceil(vocab / R) and on; equal losses on all ranks.
           deferral: dW of the last chunk is made in backward, or put off while the deferral is active.
    """
    grad = torch.is_grad_enabled() and (x_SD.requires_grad or weight_ND.requires_grad)
    rule = _Rule(smoothing, weight_ND.shape[0] if vocab is None else vocab, axis)
    return _TokenLosses.apply(x_SD, weight_ND, targets_T, scale, grad, rule, deferral)


class _Rule:
    """How losses are made from this rank's logits."""

    def __init__(self, smoothing: float, vocab: int, axis: Axis | None) -> None:
        self.smoothing, self.vocab, self.axis = smoothing, vocab, axis
        self.largest = -(-vocab // (1 if axis is None else axis.size))
        self.first = 0 if axis is None else axis.rank * self.largest
        self.spread = axis is not None and axis.sequence

    def losses(self, logits_TN: Tensor, targets_T: Tensor, losses_T: Tensor, grad: bool) -> None:
        """Fills losses; with grad, logits become d loss / d logits (of some token where there is no target)."""
        if self.axis is None and self.smoothing == 0.0:
            _losses(logits_TN, targets_T, losses_T, grad)
            return
        # No rank would miss a target that none of them holds.
        torch._assert_async((targets_T < self.vocab).all(), "target index is out of bounds")
        own = self._own_numbers(logits_TN, targets_T, losses_T)
        rows = (
            own.unsqueeze(0)
            if self.axis is None
            else self.axis.gather_small(own.flatten()).view(-1, *own.shape)
        )
        total_T = torch.logsumexp(rows[:, 0], 0)
        target_T = rows[:, 1].sum(0)
        loss_T = total_T - target_T
        if self.smoothing:
            mean_T = rows[:, 2].sum(0) / self.vocab
            loss_T = (1 - self.smoothing) * loss_T + self.smoothing * (total_T - mean_T)
        torch.mul(loss_T, targets_T != NO_TARGET, out=losses_T)
        if grad:
            self._gradients(logits_TN, targets_T, total_T)

    def _own_numbers(self, logits_TN: Tensor, targets_T: Tensor, losses_T: Tensor) -> Tensor:
        """[2 or 3, T] of this part: log sum exp, the target's logit (0 elsewhere), sum of logits when smoothing."""
        tokens, width = logits_TN.shape
        own = losses_T.new_zeros(3 if self.smoothing else 2, tokens)
        if width == 0:
            own[0] = -torch.inf
        for low, high in spans(tokens, width, logits_TN.device) if width else ():
            inner = logits_TN[low:high].to(losses_T.dtype)
            own[0, low:high] = _log_sum_exp(inner, torch.softmax(inner, -1)).squeeze(1)
            index, here = self._own_targets(targets_T[low:high], width)
            own[1, low:high] = (inner.gather(1, index) * here).squeeze(1)
            if self.smoothing:
                own[2, low:high] = inner.sum(-1)
        return own

    def _gradients(self, logits_TN: Tensor, targets_T: Tensor, total_T: Tensor) -> None:
        """Turns logits into d loss / d logits, given each token's log sum exp over the whole vocabulary."""
        tokens, width = logits_TN.shape
        for low, high in spans(tokens, width, logits_TN.device) if width else ():
            part, total = logits_TN[low:high], total_T[low:high].unsqueeze(1)
            inner = part.to(total.dtype).sub_(total) if part.dtype != total.dtype else part.sub_(total)
            elementwise(torch.exp, inner, inner)
            index, here = self._own_targets(targets_T[low:high], width)
            inner.scatter_add_(1, index, here.to(inner.dtype).mul_(self.smoothing - 1.0))
            if self.smoothing:
                inner.sub_(self.smoothing / self.vocab)
            if inner is not part:
                part.copy_(inner)

    def _own_targets(self, targets_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """[T, 1]: where in this part a token's target lies, and whether it does."""
        at = (targets_T - self.first).unsqueeze(1)
        return at.clamp(0, width - 1), (at >= 0) & (at < width) & (targets_T != NO_TARGET).unsqueeze(1)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        weight_ND: Tensor,
        targets_T: Tensor,
        scale: float,
        grad: bool,
        rule: _Rule,
        deferral: Deferral | None,
    ) -> tuple[Tensor, Tensor]:
        x_TD = rule.axis.gather_tokens(x_SD).wait() if rule.axis is not None and rule.spread else x_SD
        tokens = x_TD.shape[0]
        losses_T = torch.empty(tokens, dtype=wide(x_TD.dtype), device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if grad else None
        # By the largest part, not this rank's own: all ranks must make the same chunks.
        most = max(CHUNK_TOKENS, LOGITS_BYTES // (rule.largest * x_TD.element_size()))
        chunk = -(-tokens // -(-tokens // most))
        # One rounding per gradient: several chunks of a low dtype are added up in fp32.
        sums = x_TD.dtype if chunk >= tokens else wide(x_TD.dtype)
        dw = _WeightGradient(weight_ND, sums)
        coming: Pending | None = None
        for low in range(0, tokens, chunk):
            x = x_TD[low : low + chunk]
            logits = product(x, weight_ND.t())
            targets = targets_T[low : low + chunk]
            rule.losses(logits, targets, losses_T[low : low + chunk], grad)
            if dx_TD is None:
                continue
            # Scaling x and dx is scaling d logits, with far fewer elements; rows without a target vanish here.
            absent_T1 = (targets == NO_TARGET).unsqueeze(1)
            dx = product(logits, weight_ND).mul_(scale).masked_fill_(absent_T1, 0.0)
            dx_TD[low : low + chunk] = dx
            if rule.axis is not None and low + chunk >= tokens:
                coming = rule.axis.scatter_sum(dx_TD) if rule.spread else rule.axis.sum(dx_TD)
            if not ctx.needs_input_grad[1]:
                continue
            x = (x * scale).masked_fill_(absent_T1, 0.0)
            dw.left = (logits, x)
            if deferral is None or low + chunk < tokens:
                dw.add_left()
        if coming is not None:
            dx_TD = coming.wait()
        dw.settle()
        ctx.dx_SD, ctx.dw, ctx.deferral = dx_TD, dw, deferral
        ctx.mark_non_differentiable(losses_T)
        return losses_T.sum() * scale, losses_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dobjective, dx_SD, dw, deferral = grad_outputs[0], ctx.dx_SD, ctx.dw, ctx.deferral
        # Saves two passes in the usual case; elsewhere reading the value would stop the device's queue.
        if dobjective.device.type != "cpu" or dobjective.item() != 1.0:
            dx_SD, dw.factor = dx_SD * dobjective, dobjective
        dw_ND: Tensor | None = None
        if ctx.needs_input_grad[1]:
            if deferral is not None and deferral.active:
                deferral.keep(dw)
            else:
                dw_ND = dw.whole()
        return dx_SD, dw_ND, None, None, None, None, None


@dataclass(slots=True)
class _WeightGradient:
    """dW of the chunks so far, in the dtype of `sums`; a `Job` when the last chunk's is put off.

    left: d logits and scaled x of a chunk that is not in it yet.  factor: of the objective's own gradient.
    """

    weight_ND: Tensor
    sums: torch.dtype
    dw_ND: Tensor | None = None
    left: tuple[Tensor, Tensor] | None = None
    factor: Tensor | None = None

    def add_left(self) -> None:
        if self.left is None:
            return
        (dlogits_TN, x_TD), self.left = self.left, None
        if self.dw_ND is None:
            self.dw_ND = product(dlogits_TN.t(), x_TD).to(self.sums)
        elif self.sums == x_TD.dtype:
            product(dlogits_TN.t(), x_TD, onto=self.dw_ND)
        else:
            self.dw_ND += product(dlogits_TN.t(), x_TD)

    def settle(self) -> None:
        """Rounds what is complete."""
        if self.left is None and self.dw_ND is not None:
            self.dw_ND = self.dw_ND.to(self.weight_ND.dtype)

    def whole(self) -> Tensor | None:
        """dW in the dtype of the weight."""
        self.add_left()
        self.settle()
        return self.dw_ND if self.dw_ND is None or self.factor is None else self.dw_ND * self.factor

    def run(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight, dW)."""
        dw_ND = self.whole()
        if dw_ND is not None:
            yield self.weight_ND, dw_ND


def _losses(logits_TV: Tensor, targets_T: Tensor, losses_T: Tensor, grad: bool) -> None:
    """Fills losses; with grad, logits become d loss / d logits (of some token where there is no target)."""
    for low, high in spans(logits_TV.shape[0], logits_TV.shape[1], logits_TV.device):
        part, targets = logits_TV[low:high], targets_T[low:high].unsqueeze(1)
        valid = targets != NO_TARGET
        index = targets.clamp(min=0)
        inner = part.to(losses_T.dtype)
        weights = torch.softmax(inner, -1)
        total = _log_sum_exp(inner, weights)
        losses_T[low:high] = ((total - inner.gather(1, index)) * valid).squeeze(1)
        if grad:
            part.copy_(weights.scatter_add_(1, index, torch.full_like(total, -1.0)))


def _log_sum_exp(logits_TV: Tensor, weights_TV: Tensor) -> Tensor:
    """[T, 1] from the logits and their softmax: max - log(largest weight), exact however unlikely the target is."""
    return logits_TV.amax(-1, keepdim=True).sub_(weights_TV.amax(-1, keepdim=True).log_())
