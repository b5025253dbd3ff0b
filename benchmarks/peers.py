"""The peers of benchmarks/step.py: a plain PyTorch llama trained eagerly, under DDP and under FSDP2.

Same recipe as ours: token-mean loss over the global batch, clipping at 1.0, fused AdamW, fp32, or bf16 weights with
fp32 masters (and autocast beside it).  Written the way their documentation shows, without tricks in either direction.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQ = 6, 512, 8, 1408, 8192, 256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, HIDDEN))


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.attn = Attention()
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        dim = HIDDEN // HEADS
        angle = torch.outer(torch.arange(SEQ).float(), 10000.0 ** (-torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), dim=-1).sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Peer:
    """One training side.

    Args:  kind: eager | ddp | fsdp2.  precision: fp32 | bf16 | autocast.
    """

    def __init__(self, kind: str, precision: str, *, compile: bool, lr: float = 3e-4):
        torch.manual_seed(0)
        self.kind, self.precision = kind, precision
        model = Llama()
        for p in model.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)
        if precision == "bf16" and kind != "fsdp2":
            model = model.bfloat16()
        if compile:
            for block in model.blocks:
                block.compile(dynamic=False)
        if kind == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options = {"mp_policy": policy} if precision == "bf16" else {}
            for block in model.blocks:
                fully_shard(block, **options)
            fully_shard(model, **options)
        self.model = model
        self.wrapped = DistributedDataParallel(model) if kind == "ddp" else model
        self.params = list(model.parameters())
        self.masters = self.params
        if precision == "bf16" and kind != "fsdp2":
            self.masters = [p.detach().float() for p in self.params]
        groups = [
            {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.masters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(self, batches):
        """One optimizer step over this rank's microbatches [(tokens, targets)]; returns the local loss sum."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        count = sum(int(t.numel()) for _, t in batches) * ranks
        separate = self.masters is not self.params
        total = 0.0
        for n, (tokens, targets) in enumerate(batches):
            last = n == len(batches) - 1
            autocast = (
                torch.autocast("cpu", torch.bfloat16) if self.precision == "autocast" else nullcontext()
            )
            with self.no_sync(last), autocast:
                loss = self.wrapped(tokens, targets)
                # DDP and FSDP2 average over ranks, so the sum over ranks is restored here.
                (loss * (ranks / count)).backward()
            total += float(loss)
            if separate and ranks == 1:
                self.accumulate()
        if separate and ranks > 1:
            self.accumulate()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if separate:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        return total

    def no_sync(self, last):
        if self.kind == "ddp" and not last:
            return self.wrapped.no_sync()
        if self.kind == "fsdp2":
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    @torch.no_grad()
    def accumulate(self):
        """fp32 accumulation: adds the bf16 gradients to the masters' and drops them."""
        if self.masters[0].grad is None:
            for master, p in zip(self.masters, self.params, strict=True):
                master.grad = p.grad.float()
        else:
            torch._foreach_add_([m.grad for m in self.masters], [p.grad for p in self.params])
        for p in self.params:
            p.grad = None
