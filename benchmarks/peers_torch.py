"""torch.distributed as a peer: pipelining's schedules, and DTensor's tensor parallelism.

Same recipe as ours.  In bf16 the weights are bf16, gradients add up in fp32 (`grad_dtype`), masters are fp32.
"""

import torch
import torch.distributed as dist
from benchmarks.peers import CLIP, SMALL, adamw, angles, loss_sum, seeded_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


class Update:
    """Clip by the norm over all ranks and fused AdamW, on fp32 masters where the weights are bf16.

    Args:  total: sum of squares of this rank's gradients -> that of all ranks', each parameter counted once.
    """

    def __init__(self, params, total):
        self.params, self.total, self.norm = params, total, 0.0
        self.separate = params[0].dtype != torch.float32
        self.masters = [nn.Parameter(p.detach().float()) for p in params] if self.separate else params
        if self.separate:
            for p in params:
                p.grad_dtype = torch.float32
        plain = [p for p in self.masters if not isinstance(p, DTensor)]
        split = [p for p in self.masters if isinstance(p, DTensor)]
        # The fused kernel takes no mixture of tensors and DTensors.
        self.optimizers = [adamw(group) for group in (plain, split) if group]

    @torch.no_grad()
    def __call__(self):
        if self.separate:
            for master, p in zip(self.masters, self.params, strict=True):
                master.grad, p.grad = p.grad, None
        kinds = [[p for p in self.masters if isinstance(p, DTensor) is kind] for kind in (False, True)]
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) if kind else None for kind in kinds]
        self.norm = self.total(*norms)
        for kind in kinds:
            if kind:
                torch.nn.utils.clip_grads_with_norm_(kind, CLIP, self.norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.separate:
            for p, master in zip(self.params, self.masters, strict=True):
                p.copy_(master)


class Part(nn.Module):
    """Blocks [first, last) of a llama, with the embedding and the head where they belong."""

    def __init__(self, llama, size, first, last):
        super().__init__()
        self.embed = llama.embed if first == 0 else None
        self.blocks = nn.ModuleList(llama.blocks[first:last])
        self.norm, self.head = (llama.norm, llama.head) if last == size.layers else (None, None)
        cos, sin = angles(size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


class Pipe:
    """One of pipelining's schedules over all ranks.

    Args:  schedule: a key of SCHEDULES.  split: blocks per stage, stage by stage.
    """

    def __init__(self, schedule, precision, *, microbatches, split, size=SMALL):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        llama = seeded_llama(size)
        llama = llama.bfloat16() if precision == "bf16" else llama
        stages = len(split)
        mine = [s for s in range(stages) if s % ranks == rank]
        if schedule == "zb-v":
            mine = [rank, 2 * ranks - 1 - rank]
        bounds = [sum(split[:s]) for s in range(stages + 1)]
        parts = [Part(llama, size, bounds[s], bounds[s + 1]) for s in mine]
        device = torch.device("cpu")
        made = [PipelineStage(part, s, stages, device) for part, s in zip(parts, mine, strict=True)]
        self.first, self.last = 0 in mine, stages - 1 in mine
        self.tokens = 1
        single = schedule in ("gpipe", "1f1b")
        self.schedule = SCHEDULES[schedule](
            made[0] if single else made, microbatches, loss_fn=self.loss, scale_grads=False
        )
        self.update = Update([p for part in parts for p in part.parameters()], self.total)

    def loss(self, logits, targets):
        return loss_sum(logits, targets) / self.tokens

    def total(self, norm, _):
        square = norm.double().square().reshape(1)
        dist.all_reduce(square)
        return square.sqrt().float().squeeze()

    def step(self, batches):
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self.tokens = targets.numel()
        losses: list[torch.Tensor] = []
        given = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*([tokens] if self.first else []), **given, return_outputs=False)
        self.update()
        return float(sum(losses)) * self.tokens

    def grad_norm(self):
        return float(self.update.norm)


class Tensor:
    """Colwise and Rowwise over all ranks, vocabulary-parallel embedding, head and loss.

    Args:  sequence: SequenceParallel for the norms and the hidden state between them.
    """

    def __init__(self, precision, *, sequence, size=SMALL, mesh=None):
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        model = seeded_llama(size)
        self.model = tensor_parallel(model.bfloat16() if precision == "bf16" else model, mesh, sequence)
        self.update = Update(list(self.model.parameters()), self.total)

    def total(self, plain, split):
        split = split.full_tensor()
        return split if plain is None else (plain.square() + split.square()).sqrt()

    def step(self, batches):
        count = sum(int(t.numel()) for _, t in batches)
        total = 0.0
        for tokens, targets in batches:
            with loss_parallel():
                loss = self.model(tokens, targets)
                (loss / count).backward()
            total += float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        self.update()
        return total

    def grad_norm(self):
        return float(self.update.norm)


def tensor_parallel(model, mesh, sequence):
    """The plan of PyTorch's tutorial for a llama; one input of the attention and of the MLP is prepared for all."""
    between = Shard(1) if sequence else Replicate()
    top = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    inner = {
        "attn": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attn.q": ColwiseParallel(),
        "attn.k": ColwiseParallel(),
        "attn.v": ColwiseParallel(),
        "attn.o": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        top["norm"] = SequenceParallel()
        inner |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    return parallelize_module(model, mesh, top)
