"""Peers in plain PyTorch: a llama trained eagerly, under DDP and under FSDP2; the model is that of every other peer.

Same recipe as ours: token-mean loss over the global batch, clipping at 1.0, fused AdamW, fp32, or bf16 weights with
fp32 masters (and autocast beside it).  Written the way their documentation shows, without tricks in either direction.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sirara.pure.families import ModelShape, init_slice, unit_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A llama without biases, untied."""

    layers: int = 6
    hidden: int = 512
    heads: int = 8
    ffn: int = 1408
    vocab: int = 8192
    seq: int = 256

    @property
    def parameters(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden


SMALL = Size()
LAYERS, HIDDEN, HEADS, FFN = SMALL.layers, SMALL.hidden, SMALL.heads, SMALL.ffn
VOCAB, SEQ = SMALL.vocab, SMALL.seq
LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.head_dim = size.hidden // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        # Under tensor parallelism the projections give this rank's heads only.
        q, k, v = (f(x).view(b, s, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Mlp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate, self.up = (nn.Linear(size.hidden, size.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden, eps=1e-5), nn.RMSNorm(size.hidden, eps=1e-5)
        self.attn, self.mlp = Attention(size), Mlp(size)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, size=SMALL):
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        cos, sin = angles(size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return loss_sum(self.head(self.norm(x)), targets)


def angles(size):
    dim = size.hidden // size.heads
    angle = torch.outer(torch.arange(size.seq).float(), 10000.0 ** (-torch.arange(0, dim, 2).float() / dim))
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def loss_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def shape_of(size):
    """The same model as ours."""
    return ModelShape(
        family="llama",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        ffn=size.ffn,
        vocab=size.vocab,
        max_seq=size.seq,
        tie_embeddings=False,
    )


def initial_values(size):
    """name of a peer's parameter -> function of [start, stop) giving the values that ours starts from."""
    tensors = {t.name: t for unit in unit_specs(shape_of(size)) for t in unit.tensors}
    parts = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inner = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    inner |= {f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    inner |= {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    for i in range(size.layers):
        parts |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{name}" for ours, name in inner.items()}

    def source(name):
        spec = tensors[f"{name}.weight"]
        return lambda start, stop: torch.from_numpy(init_slice(spec, 0, start, stop))

    return {f"{part}.weight": source(name) for part, name in parts.items()}


@torch.no_grad()
def seeded_llama(size=SMALL):
    """The same weights in every process, for every peer and for ours."""
    model = Llama(size)
    values = initial_values(size)
    for name, p in model.named_parameters():
        p.copy_(values[name](0, p.numel()).view(p.shape))
    return model


@torch.no_grad()
def sharded_llama(size, shard):
    """A llama that is whole nowhere: made on meta, `shard(model)` by FSDP2, filled shard by shard."""
    with torch.device("meta"):
        model = Llama(size)
    shard(model)
    model.to_empty(device="cpu")
    model.cos.copy_(angles(size)[0])
    model.sin.copy_(angles(size)[1])
    values = initial_values(size)
    for name, p in model.named_parameters():
        local, row = p.to_local(), p[0].numel() if p.dim() > 1 else 1
        rank, ranks = dist.get_rank(), dist.get_world_size()
        start = min(p.shape[0], rank * -(-p.shape[0] // ranks)) * row
        local.copy_(values[name](start, start + local.numel()).view(local.shape))
    return model


def adamw(params, dims=lambda p: p.dim()):
    """Fused AdamW as the client of every peer makes it: matrices decay, vectors do not."""
    groups = [
        {"params": [p for p in params if dims(p) > 1], "weight_decay": DECAY},
        {"params": [p for p in params if dims(p) == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, eps=EPS, fused=True)


class Peer:
    """One training side.

    Args:  kind: eager | ddp | fsdp2.  precision: fp32 | bf16 | autocast.
           lean: FSDP2 never holds the whole model, not even while it is made.
    """

    def __init__(
        self,
        kind: str,
        precision: str,
        *,
        compile: bool = False,
        size: Size = SMALL,
        lean: bool = False,
    ):
        self.kind, self.precision, self.norm = kind, precision, 0.0
        if lean:
            model = sharded_llama(size, self.shard)
        else:
            model = seeded_llama(size)
            if precision == "bf16" and kind != "fsdp2":
                model = model.bfloat16()
            if compile:
                for block in model.blocks:
                    block.compile(dynamic=False)
            if kind == "fsdp2":
                self.shard(model)
        self.model = model
        self.wrapped = DistributedDataParallel(model) if kind == "ddp" else model
        self.params = list(model.parameters())
        self.masters = self.params
        if precision == "bf16" and kind != "fsdp2":
            self.masters = [p.detach().float() for p in self.params]
        self.optimizer = adamw(self.masters)

    def shard(self, model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy} if self.precision == "bf16" else {}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)

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
        self.norm = torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if separate:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        return total

    def grad_norm(self):
        norm = self.norm
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

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
