"""Token losses of an output projection, without the logits of the whole batch ever existing.

    tokens    | chunk 0 | chunk 1 | ...      logits of one chunk: LOGITS_BYTES or CHUNK_TOKENS
    logits -> losses, d logits (in their place) -> dx of the chunk, dW added up

Gradients are made in forward, when the logits are there, and handed out in backward.

Shape letters: T tokens, D model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from sirara.model.ops import product, spans, wide

LOGITS_BYTES = 24 << 20
# Every chunk passes over dW, which is larger than the logits of a few tokens when the vocabulary is large.
CHUNK_TOKENS = 256
NO_TARGET = -100


def token_losses(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(objective, losses_T): losses in fp32 (fp64 for fp64), 0 without a target, detached.

    The objective's gradient is that of scale * sum(losses).
    """
    grad = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    return _TokenLosses.apply(x_TD, weight_VD, targets_T, scale, grad)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: float, grad: bool
    ) -> tuple[Tensor, Tensor]:
        tokens, vocab = x_TD.shape[0], weight_VD.shape[0]
        losses_T = torch.empty(tokens, dtype=wide(x_TD.dtype), device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if grad else None
        most = max(CHUNK_TOKENS, LOGITS_BYTES // (vocab * x_TD.element_size()))
        chunk = -(-tokens // -(-tokens // most))
        # One rounding per gradient: several chunks of a low dtype are added up in fp32.
        sums = x_TD.dtype if chunk >= tokens else wide(x_TD.dtype)
        dw_VD: Tensor | None = None
        for low in range(0, tokens, chunk):
            x = x_TD[low : low + chunk]
            logits = product(x, weight_VD.t())
            targets = targets_T[low : low + chunk]
            _losses(logits, targets, losses_T[low : low + chunk], grad)
            if dx_TD is None:
                continue
            # Scaling x and dx is scaling d logits, with far fewer elements; rows without a target vanish here.
            absent_T1 = (targets == NO_TARGET).unsqueeze(1)
            dx = product(logits, weight_VD).mul_(scale).masked_fill_(absent_T1, 0.0)
            dx_TD[low : low + chunk] = dx
            x = (x * scale).masked_fill_(absent_T1, 0.0)
            if dw_VD is None:
                dw_VD = product(logits.t(), x).to(sums)
            elif sums == x_TD.dtype:
                product(logits.t(), x, onto=dw_VD)
            else:
                dw_VD += product(logits.t(), x)
        ctx.save_for_backward(dx_TD, None if dw_VD is None else dw_VD.to(x_TD.dtype))
        ctx.mark_non_differentiable(losses_T)
        return losses_T.sum() * scale, losses_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dobjective = grad_outputs[0]
        dx_TD, dw_VD = ctx.saved_tensors
        # Saves two passes in the usual case; elsewhere reading the value would stop the device's queue.
        if dobjective.device.type != "cpu" or dobjective.item() != 1.0:
            dx_TD, dw_VD = dx_TD * dobjective, dw_VD * dobjective
        return dx_TD, dw_VD, None, None, None


def _losses(logits_TV: Tensor, targets_T: Tensor, losses_T: Tensor, grad: bool) -> None:
    """Fills losses; with grad, logits become d loss / d logits (of some token where there is no target)."""
    for low, high in spans(logits_TV.shape[0], logits_TV.shape[1], logits_TV.device):
        part, targets = logits_TV[low:high], targets_T[low:high].unsqueeze(1)
        valid = targets != NO_TARGET
        index = targets.clamp(min=0)
        inner = part.to(losses_T.dtype)
        weights = torch.softmax(inner, -1)
        # log sum exp = max - log(largest weight), exact however unlikely the target is.
        total = inner.amax(-1, keepdim=True).sub_(weights.amax(-1, keepdim=True).log_())
        losses_T[low:high] = ((total - inner.gather(1, index)) * valid).squeeze(1)
        if grad:
            part.copy_(weights.scatter_add_(1, index, torch.full_like(total, -1.0)))
