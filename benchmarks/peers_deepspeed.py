"""DeepSpeed as a peer: ZeRO 1-3 and its PipelineModule, on its CPU accelerator over gloo.

Run with DS_ACCELERATOR=cpu and DS_BUILD_OPS=0.  The client gives fused AdamW; gradient_clipping is set, because
DeepSpeed's default is 1.0, not "none".  Its pipeline clips each stage by that stage's own norm in fp32.
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers import CLIP, SMALL, Llama, adamw, angles, initial_values, seeded_llama
from deepspeed.pipe import PipelineModule
from torch import nn


def config(precision, *, micro, accumulation, zero, **more):
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero} | more,
        "steps_per_print": 1 << 30,
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    return settings


class Zero:
    """ZeRO stage 1, 2 or 3 over all ranks.

    Args:  lean: settings that hold as little as DeepSpeed can (buckets of a block, nothing kept gathered, parameters
                 sharded while they are made) instead of its defaults, which are faster on small models.
    """

    def __init__(self, stage, precision, *, micro, microbatches, size=SMALL, lean=False):
        settings = config(precision, micro=micro, accumulation=microbatches, zero=stage)
        if precision == "bf16" and microbatches > 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if lean:
            block = 4 * size.hidden**2 + 3 * size.hidden * size.ffn
            settings["zero_optimization"] |= {"reduce_bucket_size": block, "allgather_bucket_size": block}
            if stage == 3:
                settings["zero_optimization"] |= {
                    "stage3_prefetch_bucket_size": block,
                    "stage3_max_live_parameters": 0,
                    "stage3_max_reuse_distance": 0,
                }
        if lean and stage == 3:
            deepspeed.init_distributed(dist_backend="gloo")
            with deepspeed.zero.Init(config_dict_or_path=settings):
                model = Llama(size)
            values = initial_values(size)
            for name, p in model.named_parameters():
                with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
                    p.copy_(values[name](0, p.numel()).view(p.shape))
        else:
            model = seeded_llama(size)
        optimizer = adamw(list(model.parameters()), dims=lambda p: len(getattr(p, "ds_shape", p.shape)))
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )

    def step(self, batches):
        ranks = dist.get_world_size()
        count = sum(int(t.numel()) for _, t in batches) * ranks
        total = 0.0
        for tokens, targets in batches:
            loss = self.engine(tokens, targets)
            # The engine divides by microbatches and averages over ranks; the mean over all tokens is meant.
            self.engine.backward(loss * (len(batches) * ranks / count))
            self.engine.step()
            total += float(loss)
        return total

    def grad_norm(self):
        return float(self.engine.get_global_grad_norm())


class First(nn.Module):
    def __init__(self, llama):
        super().__init__()
        self.embed = llama.embed

    def forward(self, tokens):
        return self.embed(tokens)


class Middle(nn.Module):
    def __init__(self, llama, index, size):
        super().__init__()
        self.block = llama.blocks[index]
        cos, sin = angles(size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        return self.block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))


class Last(nn.Module):
    def __init__(self, llama):
        super().__init__()
        self.norm, self.head = llama.norm, llama.head

    def forward(self, x):
        return self.head(self.norm(x))


class SplitModule(PipelineModule):
    """A PipelineModule cut where it is told."""

    def __init__(self, layers, bounds, **options):
        self.told = bounds
        super().__init__(layers, **options)

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = self.told
        self._set_bounds(start=self.told[stage], stop=self.told[stage + 1])


class Pipe:
    """DeepSpeed's pipeline (1F1B) over all ranks.  Args:  split: blocks per stage."""

    def __init__(self, precision, *, micro, microbatches, split, size=SMALL):
        deepspeed.init_distributed(dist_backend="gloo")
        llama = seeded_llama(size)
        layers = [First(llama), *(Middle(llama, i, size) for i in range(size.layers)), Last(llama)]
        bounds = [0]
        for n in split:
            bounds.append(bounds[-1] + n + (bounds[-1] == 0))
        bounds[-1] += 1
        module = SplitModule(layers, bounds, num_stages=dist.get_world_size(), loss_fn=mean_loss)
        # bf16 sums in fp32 need DeepSpeed's BF16 optimizer, which it uses at stage 1 (of one data-parallel rank here).
        settings = config(precision, micro=micro, accumulation=microbatches, zero=int(precision == "bf16"))
        if precision == "bf16":
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=module, optimizer=adamw(list(module.parameters())), config=settings
        )

    def step(self, batches):
        mean = self.engine.train_batch(iter(batches))
        return float(mean) * sum(int(t.numel()) for _, t in batches)

    def grad_norm(self):
        return float(self.engine.get_global_grad_norm() or 0.0)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
