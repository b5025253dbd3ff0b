"""What a published run is, of what its row says: its model, layout, and the conventions of the program that ran it.

A row names its program in its source, implementation and zero_stage columns.  From that follow which kernels it ran and
which copies of a parameter it held: facts about Megatron-LM, DeepSpeed, FSDP, ..., none about a table of measurements.
What a row does not say is refused, or taken from the model's published configuration or a default, and noted.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from sirara.errors import ConfigError
from sirara.plan.hardware import DTYPES, find, index_of
from sirara.plan.named import SHAPE, known
from sirara.plan.points import Attention, Kind, Launch, Loss, Recompute, Schedule

Columns = dict[str, Any]


class Refused(Exception):
    """A row that cannot be predicted; the message is the reason."""


def columns_of(row: Mapping[str, str], assumed: list[str]) -> Columns:
    """Columns of `Points` for one row; `assumed` gets what the row does not say.  Raises: Refused."""
    c: Columns = {}
    _stated(row)
    _where(row, c)
    framework = _framework(row)
    _model(row, c, framework, assumed)
    _layout(row, c, framework, assumed)
    _conventions(row, c, framework, assumed)
    _check(c, assumed)
    return c


_NEEDED = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "vocab",
    "seq",
    "gpus",
    "tp",
    "pp",
    "dp",
    "micro_batch",
    "global_batch",
)
_OPTIONAL = ("kv_heads", "vpp", "cp", "ep", "experts", "topk")
_KNOWN = {
    "recompute": r".*selective.*|full.*|true|false|1|0|yes|no|none",
    "zero_stage": r"(zero[ -]?)?[0-3](\b.*)?|.*fsdp[12]?|none",
    "precision": r".*(fp4|fp8|fp16|bf16).*",
    "schedule_or_impl": r"(?!.*(dualpipe|chimera|pipedream|hanayo|terapipe|v-half|v-min)).*",
}
"""What columns of words may say, where another word would be another program than the one that is predicted."""


def _stated(row: Mapping[str, str]) -> None:
    """Refuses counts that are none, and words that nothing here stands for."""
    for key in (*_NEEDED, *_OPTIONAL):
        text = row.get(key)
        if text and not (1 if key in _NEEDED else 0) <= number(text) < float("inf"):
            raise Refused(f"{key} is {text!r}")
    for key in ("step_time_s", "memory"):
        text = row.get(key)
        if text and not 0 < number(text) < float("inf"):
            raise Refused(f"{key} is {text!r}")
    for key, words in _KNOWN.items():
        text = (row.get(key) or "").strip().lower()
        if text and not re.fullmatch(words, text, re.DOTALL):
            raise Refused(f"{key} {row.get(key)!r} is not predicted")


OMNI_PATH = 135 / 400 / 0.6
"""Rate of Omni-Path's ports beside what they are sold as, before the share that collectives reach of any network
(`Constants.network` starts at 0.6): four of 100 Gb/s gave 135 on Jean Zay (stas00/ml-engineering, network)."""


def _where(row: Mapping[str, str], c: Columns) -> None:
    kind = (row.get("gpu_type") or "").strip()
    if not kind:
        raise Refused("gpu_type is not stated")
    try:
        c["accelerator"] = index_of(kind)
    except ConfigError:
        raise Refused(f"accelerator {kind!r} is not in the table") from None
    accelerator = find(kind)
    c["per_node"] = 16 if "dgx-2" in kind.lower() else 4 if accelerator.domain == 72 else 8
    notes = row.get("notes") or ""
    several = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb\b[^;]*?per (\d+)-GPU node", notes)
    one = re.search(r"(\d+)\s*Gb/s per (\d+)-GPU node", notes)
    c["out_bytes_per_s"] = 0.0
    if several:
        links, rate, gpus = (int(g) for g in several.groups())
        reached = OMNI_PATH if "omni-path" in notes.lower() else 1.0
        c["out_bytes_per_s"], c["per_node"] = reached * links * rate / 8 * 1e9 / gpus, gpus
    elif one:
        rate, gpus = (int(g) for g in one.groups())
        c["out_bytes_per_s"], c["per_node"] = rate / 8 * 1e9 / gpus, gpus


def _framework(row: Mapping[str, str]) -> str:
    """Which program's conventions a row follows: read from its source, implementation and zero_stage columns."""
    text = " ".join((row.get(k) or "") for k in ("source", "schedule_or_impl", "zero_stage")).lower()
    for word, name in (
        ("zero bubble", "zb"), ("simumax", "te-plain"), ("torchtitan", "titan"), ("llm-foundry", "foundry"),
        ("automodel", "automodel"), ("nanotron", "nanotron"), ("bridge", "bridge"), ("nemo", "nemo"),
        ("tp-comm-overlap", "megatron"), ("zero-offload", "offload"), ("megatron-deepspeed", "old"),
        ("zero-3", "old"), ("megatron", "old"), ("fsdp2", "titan"), ("fsdp", "foundry"),
    ):  # fmt: skip
        if word in text:
            return name
    return "megatron"


def _model(row: Mapping[str, str], c: Columns, framework: str, assumed: list[str]) -> None:
    name = (row.get("model") or "").lower()
    extra = known(name)
    for key in (*SHAPE, "seq"):
        c[key] = number(row.get(key))
    # A row that states its shape is taken at its word; what it leaves out of it is not of another model then.
    whole = np.isnan(c["layers"]) and np.isnan(c["hidden"])
    for key in SHAPE:
        if whole and np.isnan(c[key]) and key in extra:
            c[key] = extra[key]
            assumed.append(f"{key} {extra[key]:.0f}, of the model's published configuration")
    if re.search(r"nemotron[ _-]*(3|v3|h)([ _-]|$)|mamba|jamba|zamba|falcon[ _-]?h1", name):
        raise Refused("blocks of Mamba are not predicted")
    if np.isnan(c["layers"]) or np.isnan(c["hidden"]):
        raise Refused("layers and hidden are not stated")
    old = framework in ("old", "zb", "offload")
    if np.isnan(c["heads"]):
        # Published models have heads of about 128; Megatron's of that time too.
        choice = [a for a in range(1, 513) if c["hidden"] % a == 0 and c["hidden"] / a % 8 == 0]
        c["heads"] = min(choice, key=lambda a: (abs(c["hidden"] / a - 128), a))
        assumed.append(f"heads {c['heads']}, the count that gives heads nearest to 128")
    if np.isnan(c["seq"]):
        if framework in ("old", "offload"):
            c["seq"] = 1024.0
            assumed.append("seq 1024, GPT-2's")
        else:
            raise Refused("seq is not stated")
    if np.isnan(c["vocab"]):
        c["vocab"] = 131072.0 if framework == "nanotron" else 51200.0
        assumed.append(f"vocab {c['vocab']:.0f}")
    gated = framework not in ("old", "zb", "offload", "foundry") and not re.match(r"gpt(?![ _-]?oss)", name)
    c["gated"] = float(gated)
    if np.isnan(c["ffn"]):
        c["ffn"] = 4 * c["hidden"]
        assumed.append("ffn 4 * hidden")
    moe = c["experts"] > 0
    c["experts"], c["topk"] = (c["experts"], c["topk"]) if moe else (0.0, 0.0)
    c["expert_ffn"] = c["ffn"] if moe else 0.0
    c["kv_heads"] = 0.0 if np.isnan(c["kv_heads"]) else c["kv_heads"]
    for key in ("head_dim", "q_rank", "kv_rank", "rope_dim", "shared_ffn", "dense_ffn", "dense_layers",
                "predict_ahead", "node_limit", "window", "window_share"):  # fmt: skip
        c[key] = float(extra.get(key, 0.0))
    if framework == "automodel":
        # Its models are those of the transformers library, which have no blocks that predict further tokens.
        c["predict_ahead"] = 0.0
    if "reduced layers" in (row.get("notes") or ""):
        c["dense_layers"], c["predict_ahead"] = min(1.0, c["dense_layers"]), 0.0
    c["dropout"] = float(old and framework != "offload")
    c["layer_norm"] = float(not gated)
    c["bias"] = float(extra.get("bias", not gated))
    c["tied"] = float(not gated or _is_tied(row, c))
    c["learned"] = float(old)


def _is_tied(row: Mapping[str, str], c: Mapping[str, Any]) -> bool:
    """Whether the stated number of parameters is nearer to that of one table for embedding and head."""
    stated = number(row.get("params_b")) * 1e9
    if np.isnan(stated) or c["experts"] > 0:
        return False
    kv = (c["kv_heads"] or c["heads"]) / c["heads"]
    block = (2 + 2 * kv) * c["hidden"] ** 2 + 3 * c["hidden"] * c["ffn"]
    once = c["layers"] * block + c["vocab"] * c["hidden"]
    return abs(once - stated) < abs(once + c["vocab"] * c["hidden"] - stated)


def _layout(row: Mapping[str, str], c: Columns, framework: str, assumed: list[str]) -> None:
    for key in ("tp", "pp", "vpp", "cp", "ep"):
        c[key] = max(1.0, np.nan_to_num(number(row.get(key))))
    if (
        np.isnan(number(row.get("vpp")))
        and "interleaved" in (row.get("schedule_or_impl") or "")
        and c["pp"] > 1
    ):
        each = c["layers"] / c["pp"]
        if each == int(each):
            c["vpp"] = each / 2 if each % 2 == 0 else each
            assumed.append("vpp: two blocks to a chunk")
    gpus = number(row.get("gpus"))
    if np.isnan(gpus):
        raise Refused("gpus are not stated")
    c["dp"] = number(row.get("dp"))
    if np.isnan(c["dp"]):
        c["dp"] = gpus / (c["tp"] * c["pp"] * c["cp"])
    if abs(c["dp"] * c["tp"] * c["pp"] * c["cp"] - gpus) > 0.5:
        raise Refused(
            f"tp {c['tp']:.0f} * pp {c['pp']:.0f} * cp {c['cp']:.0f} * dp {c['dp']:.0f} is not {gpus:.0f} gpus"
        )
    c["global_batch"], c["micro_batch"] = number(row.get("global_batch")), number(row.get("micro_batch"))
    if np.isnan(c["global_batch"]):
        raise Refused("global_batch is not stated")
    if np.isnan(c["micro_batch"]):
        most = int(c["global_batch"] // c["dp"])
        c["micro_batch"] = float(min(most, 8))
        assumed.append("micro_batch: the fastest that fits")
    stage = (row.get("zero_stage") or "").lower()
    digit = re.match(r"(?:zero[ -]?)?(\d)", stage)
    c["zero"] = float(digit.group(1)) if digit else 3.0 if "fsdp" in stage else 0.0
    c["offload_optimizer"] = float("cpu offload" in stage)
    if framework in ("te-plain", "megatron", "nemo", "bridge") and not digit and "fsdp" not in stage:
        c["zero"] = 1.0
    if framework == "nanotron" or framework == "zb":
        c["zero"] = float(digit.group(1)) if digit else 0.0
    even = c["layers"] % (c["pp"] * c["vpp"]) == 0
    notes = row.get("notes") or ""
    c["split_counts_ends"] = float(
        c["pp"] > 1 and (not even or "one layer fewer" in notes or "type:transformer|embedding" in notes)
    )
    # Nanotron counts products: those of a block, and of the head, which is on the last stage.
    block = 2 * (1 + c["kv_heads"] / c["heads"] if c["kv_heads"] else 2) * c["hidden"] + 3 * c["ffn"]
    c["head_blocks"] = c["vocab"] / block if framework == "nanotron" else 0.0


def _conventions(row: Mapping[str, str], c: Columns, framework: str, assumed: list[str]) -> None:
    text = (row.get("precision") or "").lower()
    low = (
        "fp4" if "fp4" in text else "fp8" if "fp8" in text or (not text and framework == "bridge") else "bf16"
    )
    if "fp16" in text:
        low = "fp16"
    c["dtype"] = DTYPES.index(low)
    c["recompute"], c["recompute_share"] = _recompute(row, framework), 1.0
    if not row.get("recompute") and framework in ("old", "offload"):
        assumed.append("full recompute, as its program was used")
    if not row.get("recompute") and framework in ("bridge", "nemo", "automodel", "megatron", "nanotron"):
        assumed.append("recompute: none, or what makes it fit")
    c["schedule"] = _schedule(row, c)
    if c["schedule"] == Schedule.INTERLEAVED and c["vpp"] == 1:
        c["vpp"] = (c["layers"] + 2) / c["pp"]
    text = (row.get("schedule_or_impl") or "").lower()
    kinds = {"old": Kind.DEEPSPEED if "deepspeed" in text else Kind.MEGATRON_2021, "offload": Kind.MEGATRON_2021,
             "foundry": Kind.FSDP, "titan": Kind.FSDP2, "automodel": Kind.FSDP2_TE}  # fmt: skip
    c["kind"] = int(kinds.get(framework, Kind.MEGATRON))
    c["lora"] = float("lora" in text)
    flash = {"old": Attention.PLAIN, "zb": Attention.PLAIN, "offload": Attention.PLAIN, "foundry": Attention.FLASH,
             "titan": Attention.FLASH, "nanotron": Attention.FLASH}  # fmt: skip
    c["attention"] = int(flash.get(framework, Attention.TUNED))
    c["loss"] = int(
        Loss.TORCH if framework in ("titan", "nanotron")
        else Loss.FUSED if framework in ("te-plain", "automodel", "bridge", "nemo", "megatron", "foundry")
        else Loss.PARALLEL
    )  # fmt: skip
    fused = framework in ("te-plain", "megatron", "nemo", "bridge", "automodel") or "compile" in text
    c["launch"] = int(Launch.FUSED if fused else Launch.EAGER)
    if framework == "bridge" and find(row["gpu_type"]).domain == 72:
        # The recipes replay graphs where a rack is one scale-up domain (scripts/performance of Megatron-Bridge).
        c["launch"] = int(Launch.GRAPHS)
    if "tokendrop" in (row.get("model") or "").lower():
        # With a fixed capacity the host need not learn how many tokens each expert gets before it launches.
        c["launch"] = int(Launch.GRAPHS)
    modern = framework in ("te-plain", "megatron", "nemo", "bridge", "nanotron")
    # Selective recompute came to Megatron with sequence parallelism, in one paper (arXiv:2205.05198).
    with_it = framework == "old" and c["recompute"] == Recompute.CORE
    c["sequence_parallel"] = float((modern or with_it) and c["tp"] > 1)
    overlap = framework in ("megatron", "nemo", "bridge")
    c["tp_overlap"] = c["dp_overlap"] = c["pp_overlap"] = float(overlap)
    across = c["experts"] > 0 and c["ep"] > max(find(row["gpu_type"]).domain, c["per_node"])
    c["ep_overlap"] = float(framework == "bridge" and across)
    c["dedup"] = float(framework in ("bridge", "automodel"))
    # Megatron's pipeline and DeepSpeed's both cut a boundary tensor over tensor-parallel ranks.
    c["scatter_gather"] = 1.0
    _bytes(row, c, framework)


def _bytes(row: Mapping[str, str], c: Columns, framework: str) -> None:
    weight, gather, grad, optim, reduce = 2.0, 2.0, 4.0, 12.0, 4.0
    precision = (row.get("precision") or "").lower()
    if framework in ("old", "zb", "offload"):
        # DeepSpeed's bf16 optimizer keeps 16-bit gradients and their fp32 sum.
        grad = 6.0 if "fp32 grad" in precision else 2.0
        reduce = 4.0 if "fp32 grad" in precision else 2.0
    elif framework in ("foundry", "titan", "automodel"):
        # AutoModel holds weights, and so gradients and moments, in 16 bits.
        weight, grad, optim = (2.0, 2.0, 4.0) if framework == "automodel" else (4.0, 4.0, 8.0)
        pure = "pure" in (row.get("schedule_or_impl") or "").lower()
        reduce = 2.0 if pure or framework == "automodel" else 4.0
    elif framework == "nanotron":
        # Beside fp32 sums, the 16-bit buckets of torch's DDP, where there is one.
        grad = 6.0 if c["dp"] > 1 else 4.0
    c["weight_bytes"], c["gather_bytes"], c["grad_bytes"] = weight, gather, grad
    c["optim_bytes"], c["reduce_bytes"] = optim, reduce
    c["dummy_bytes"] = 2.0 if framework in ("te-plain", "bridge", "nemo", "megatron") else 0.0
    c["state_shard"] = 0.0


def _recompute(row: Mapping[str, str], framework: str) -> int:
    text = (row.get("recompute") or "").lower()
    if "selective" in text:
        return int(Recompute.OPS if framework == "titan" else Recompute.CORE)
    if text.startswith("full") or text in ("true", "1", "yes"):
        return int(Recompute.FULL)
    if not text and framework in ("old", "offload"):
        return int(Recompute.FULL)
    return 0


def _schedule(row: Mapping[str, str], c: Mapping[str, Any]) -> int:
    text = (row.get("schedule_or_impl") or "").lower()
    for word, kind in (
        ("zb-2p", Schedule.ZB_H2), ("zb-h2", Schedule.ZB_H2), ("zb-1p", Schedule.ZB_H1), ("zb-h1", Schedule.ZB_H1),
        ("zb-v", Schedule.ZB_V), ("gpipe", Schedule.GPIPE), ("afab", Schedule.GPIPE),
        ("1f1b-i", Schedule.INTERLEAVED),
    ):  # fmt: skip
        if word in text:
            return int(kind)
    return int(Schedule.INTERLEAVED if c["vpp"] > 1 else Schedule.ONE_F_ONE_B)


def _check(c: Mapping[str, Any], assumed: list[str]) -> None:
    if c["heads"] % c["tp"] and c["hidden"] % c["tp"]:
        raise Refused(f"tp {c['tp']:.0f} divides neither heads nor hidden")
    if c["kv_heads"] and c["heads"] % c["kv_heads"]:
        raise Refused(f"kv_heads {c['kv_heads']:.0f} do not divide heads {c['heads']:.0f}")
    if c["experts"] > 0 and c["experts"] % c["ep"]:
        raise Refused(f"ep {c['ep']:.0f} does not divide {c['experts']:.0f} experts")
    if c["experts"] > 0 and np.isnan(c["topk"]):
        raise Refused("topk is not stated")
    if c["experts"] > 0 and not 1 <= c["topk"] <= c["experts"]:
        raise Refused(f"a token goes to {c['topk']:.0f} of {c['experts']:.0f} experts")
    # Embedding and head may have chunks of their own.
    if c["pp"] * c["vpp"] > c["layers"] + 2:
        raise Refused(f"pp {c['pp']:.0f} * vpp {c['vpp']:.0f} is more than {c['layers']:.0f} layers have")
    rounds = c["global_batch"] / (c["micro_batch"] * c["dp"])
    if rounds < 1:
        raise Refused(
            f"global_batch {c['global_batch']:.0f} is less than a microbatch on each of dp {c['dp']:.0f}"
        )
    if abs(rounds - round(rounds)) > 1e-6:
        assumed.append(f"{int(rounds) + 1} microbatches, the last not full on every rank")
    full = c["kind"] in (Kind.FSDP, Kind.FSDP2, Kind.FSDP2_TE) and c["zero"] >= 3
    if full and c["pp"] > 1 and c["experts"] == 0:
        raise Refused("fully sharded parameters over pipeline stages of a dense model are not predicted")


def number(text: str | None) -> float:
    """A number, or NaN where there is none."""
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")
