"""The configuration as types: every key, its default, its limits. Nothing is accepted and ignored.

One class is one section; a part of Sirara takes its own section, never the root. What a single value may be
is said here; what must hold between values, and what does not run yet, is in `config.check` and
`config.check_tiers`, called by `RunConfig`.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from sirara.config import check, check_tiers
from sirara.config.units import format_size, format_time, parse_size_bytes, parse_time_s
from sirara.pure.recompute import parse
from sirara.pure.schedule import chunks_of

_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def _number(value: object) -> object:
    # YAML 1.1 readers and environments hand over 3e-4 as text.
    if isinstance(value, str) and _FLOAT.fullmatch(value.strip()):
        return float(value)
    return value


def _size(value: object) -> object:
    return parse_size_bytes(value) if isinstance(value, str) else value


def _time(value: object) -> object:
    return parse_time_s(value) if isinstance(value, str) else value


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
SizeBytes = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema({"type": ["string", "integer"], "description": "bytes, or a size such as 512GiB"}),
]
Seconds = Annotated[
    float,
    BeforeValidator(_time),
    PlainSerializer(format_time, when_used="json"),
    WithJsonSchema({"type": ["string", "number"], "description": "seconds, or a time such as 30m"}),
]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Path = Annotated[str, Field(min_length=1)]


def _recipe(value: str) -> str:
    parse(value)
    return value


Recipe = Annotated[str, AfterValidator(_recipe)]
"""What blocks make again: see `pure.recompute`."""


class Section(BaseModel):
    """What all sections share: frozen, strict, unknown keys refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class RopeScalingConfig(Section):
    """How rotary frequencies are stretched beyond the sequence length a model was made for."""

    kind: Literal["linear", "llama3"]
    factor: Annotated[Number, Field(ge=1.0)]
    low_freq_factor: Annotated[Number, Field(gt=0.0)] = 1.0
    high_freq_factor: Annotated[Number, Field(gt=0.0)] = 4.0
    original_max_seq: Positive = 8192


class ModelConfig(Section):
    """A family and its sizes, or a preset (sizes beside it replace its own), or a Hugging Face folder."""

    preset: str | None = Field(default=None, description="a published model by name, such as llama3-8b")
    from_: Path | None = Field(
        default=None, alias="from", description="a Hugging Face folder: sizes and weights"
    )
    family: str | None = Field(default=None, description="gpt2 | bloom | llama | mistral | qwen2 | qwen3")
    layers: Positive | None = None
    hidden: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = Field(default=None, description="key and value heads; default: heads")
    head_dim: Positive | None = Field(default=None, description="default: hidden / heads")
    ffn: Positive | None = Field(default=None, description="width of the MLP; default: the family's rule")
    vocab: Positive | Literal["tokenizer"] | None = Field(
        default=None, description="a number, or the tokenizer's"
    )
    max_seq: Positive | None = Field(default=None, description="longest sequence the model can see")
    tie_embeddings: bool | None = Field(default=None, description="output projection = token embedding")
    norm_eps: Annotated[Number, Field(gt=0.0)] | None = None
    rope_theta: Annotated[Number, Field(gt=0.0)] | None = None
    rope_scaling: RopeScalingConfig | None = None
    sliding_window: Positive | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = Field(0.0, description="on residuals and embeddings")
    attention_dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0


class SourceConfig(Section):
    """One token store of the training blend."""

    path: Path
    weight: Annotated[Number, Field(gt=0.0)] = 1.0


class EvalConfig(Section):
    """One token store to evaluate on; its metric is `eval/<name>/loss`."""

    path: Path
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        default="", description="default: the last part of the path", validate_default=False
    )

    @model_validator(mode="before")
    @classmethod
    def _name_it(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("path"), str) and not value.get("name"):
            last = [part for part in value["path"].split("/") if part not in ("", ".", "..")][-1:]
            name = re.sub(r"[^A-Za-z0-9._-]", "-", last[0]).lstrip("._-") if last else ""
            return {**value, "name": name or "eval"}
        return value


class DataConfig(Section):
    tokenizer: Path | None = Field(default=None, description="tokenizer.json; default: the first source's")
    train: Annotated[list[SourceConfig], Field(min_length=1)]
    eval: list[EvalConfig] = []
    seq_len: Positive = Field(description="tokens per training sequence")


class OptimizerConfig(Section):
    """One optimizer; muon updates the matrices of blocks and leaves all other tensors to its adamw."""

    name: Literal["adamw", "lion", "muon"] = "adamw"
    lr: Annotated[Number, Field(gt=0.0)] = 3e-4
    betas: Annotated[
        tuple[Annotated[Number, Field(ge=0.0, lt=1.0)], Annotated[Number, Field(ge=0.0, lt=1.0)]],
        BeforeValidator(_pair),
    ] = Field(
        default=(0.9, 0.95), description="default: [0.9, 0.95] for adamw and muon, [0.9, 0.99] for lion"
    )
    eps: Annotated[Number, Field(gt=0.0)] = Field(default=1e-8, description="adamw and muon's adamw")
    weight_decay: Annotated[Number, Field(ge=0.0)] = Field(default=0.1, description="of matrices alone")
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = Field(default=0.95, description="muon alone")
    nesterov: bool = Field(default=True, description="muon alone")
    ns_steps: Annotated[int, Field(ge=1, le=20)] = Field(
        default=5, description="muon alone: Newton-Schulz iterations"
    )

    @model_validator(mode="before")
    @classmethod
    def _betas_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("name") == "lion" and value.get("betas") is None:
            return {**value, "betas": [0.9, 0.99]}
        return value


class LrScheduleConfig(Section):
    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: Count = 0
    min_lr_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] = Field(
        default=0.0, description="last rate / optimizer.lr"
    )
    decay_steps: Count = Field(default=0, description="wsd alone: its last steps; 0: a fifth of train.steps")


class TrainConfig(Section):
    steps: Positive = Field(description="optimizer steps of the whole run")
    global_batch: Positive = Field(description="sequences per optimizer step")
    micro_batch: Positive = Field(description="sequences per forward and backward")
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="fp32", description="dtype of weights"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    clip_grad_norm: Annotated[Number, Field(gt=0.0)] | None = Field(
        default=1.0, description="null: no clipping"
    )
    recompute: Recipe | list[Recipe | Count] | Positive = Field(
        default="none",
        description="none | selective | full, a number of blocks per stage, a recipe such as norm+act or full:2 mlp, "
        "or a list of them, one per stage",
    )
    label_smoothing: Annotated[Number, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="share of the target's probability that is spread over the vocabulary"
    )
    freeze: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="globs over tensor names, such as *.embed_tokens.weight: not trained"
    )
    eval_every: Positive | None = Field(default=None, description="steps; null: at the end only")
    compile: bool = False

    @model_validator(mode="before")
    @classmethod
    def _length_of_wsd(cls, value: Any) -> Any:
        schedule = value.get("lr_schedule") if isinstance(value, dict) else None
        if isinstance(schedule, dict) and schedule.get("name") == "wsd" and not schedule.get("decay_steps"):
            steps = value.get("steps")
            if type(steps) is int and schedule.get("decay_steps") in (None, 0):
                return {**value, "lr_schedule": {**schedule, "decay_steps": max(1, steps // 5)}}
        return value


class MeshConfig(Section):
    """Degrees of the axes, outermost first, and how each is used."""

    pp: Positive = 1
    dp: Positive | Literal["auto"] = Field(default="auto", description="auto: what the other axes leave")
    cp: Positive = 1
    tp: Positive = 1
    sequence_parallel: bool = Field(
        default=False, description="between the products of a block each tp rank holds a share of the tokens"
    )
    ep: Positive = 1
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    gather: Literal["microbatch", "step"] = Field(
        default="microbatch",
        description="zero=3: weights are gathered for each use, or kept for a whole step",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    virtual_stages: Positive | Literal["auto"] = Field(
        default="auto", description="per pp rank; auto: 1, or 2 for interleaved and zb-v"
    )
    split: Literal["auto"] | list[Count] = Field(default="auto", description="or layers per stage")
    block: Literal["auto"] | Positive = Field(
        default="auto", description="microbatches added locally: 1, 2, 4, ..."
    )

    @field_validator("block")
    @classmethod
    def _power_of_two(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value & (value - 1):
            below = 1 << value.bit_length() - 1
            raise ValueError(f"is not a power of two; {below} and {2 * below} are")
        return value

    @property
    def chunks(self) -> int:
        """Virtual stages per pp rank."""
        return chunks_of(self.schedule, self.virtual_stages)

    @property
    def stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pp * self.chunks


Place = Literal["none", "host", "disk"]


class OffloadConfig(Section):
    optimizer: Place = "none"
    params: Place = "none"
    activations: Place = "none"
    path: Path | None = None
    host_budget: SizeBytes | None = None


Tier = Literal["memory", "peer", "parity", "disk", "object"]


TierName = Literal["memory", "peer", "parity", "disk", "object"]


def _option(value: object) -> object:
    """As the libraries of object stores want it: `true` and `9000` are texts."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class TierConfig(Section):
    """Where copies of a checkpoint are kept, and how often. In a list of tiers a bare name stands for {tier: name}."""

    tier: TierName
    every: Positive | None = Field(default=None, description="steps; null: as checkpoint.every")
    path: Path | None = Field(
        default=None,
        description="absolute. memory, peer, parity: folder in shared memory; disk: folder of the node's own disk "
        "(null: the run folder, shared). {node} in it becomes the number of the node",
    )
    copies: Annotated[int, Field(ge=2)] = Field(
        default=2, description="peer: nodes that hold each image, its own included"
    )
    data: Positive = Field(default=4, description="parity: blocks of data in a group of nodes")
    parity: Positive = Field(default=2, description="parity: nodes of a group that may be lost")
    domains: list[str] = Field(
        default=[],
        description="peer, parity: what each node shares with others that fail with it (rack, power)",
    )
    url: str | None = Field(default=None, description="object: s3://bucket/prefix and the like")
    options: dict[
        str, Annotated[str, BeforeValidator(_option, json_schema_input_type=str | bool | float)]
    ] = Field(default={}, description="object: endpoint, region, ...; credentials come from the environment")


def _tier(value: object) -> object:
    return {"tier": value} if isinstance(value, str) else value


class CheckpointConfig(Section):
    every: Positive | None = Field(default=None, description="steps; null: at the end and on request only")
    keep_last: Positive = 3
    keep_every: Positive | None = Field(default=None, description="steps that are kept for ever")
    keep_best: str | None = Field(
        default=None, description="eval/<set>/loss: the step where it was lowest is kept"
    )
    async_: bool = Field(default=True, alias="async", description="train on while a save is written")
    when_busy: Literal["queue", "skip", "wait"] = Field(
        default="queue",
        description="a save is due while one is being written: save at the first step after it, not at all, or wait",
    )
    tiers: Annotated[list[Annotated[TierConfig, BeforeValidator(_tier)]], Field(min_length=1)] = [
        TierConfig(tier="disk")
    ]
    max_failures: Count = Field(default=5, description="failed saves in a row that end the run")
    retry: Annotated[Seconds, Field(gt=0.0)] = Field(
        default=30.0, description="after a failed save the next try, doubled each time"
    )


class LaunchConfig(Section):
    nproc: Positive | Literal["auto"] = Field(default="auto", description="workers per node")
    threads: Positive | Literal["auto"] = Field(default="auto", description="compute threads per worker")
    nodes: Positive = 1
    max_restarts: Count = 3
    stop_grace: Annotated[Seconds, Field(gt=0.0)] = 600.0
    hang_timeout: Annotated[Seconds, Field(gt=0.0)] = 600.0


class LogConfig(Section):
    every: Positive = Field(default=1, description="steps between two lines")
    sinks: list[str] = []


ON_PAPER = {"on_paper": True}
"""Context of a validation for a plan: what this version does not run is accepted."""


def _sections_of_mesh(value: object) -> object:
    # `mesh: auto` leaves every choice to us.
    return {} if value == "auto" else value


class RunConfig(Section):
    """A whole run. The resolved form of it is stored in the run folder."""

    schema_: Literal[1] = Field(default=1, alias="schema", description="version of this format")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    run_dir: Path = "runs"
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 1234
    numerics: Literal["exact", "fast"] = "exact"
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    mesh: Annotated[MeshConfig, BeforeValidator(_sections_of_mesh)] = MeshConfig()
    offload: OffloadConfig = OffloadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        # What does not run yet can be planned.
        if info.context != ON_PAPER:
            check.runs_now(self)
        check.values_fit(self)
        check_tiers.tiers_fit(self)
        return self


def json_schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors."""
    schema = RunConfig.model_json_schema(by_alias=True)
    mesh = schema["properties"]["mesh"]
    mesh.pop("default")
    schema["properties"]["mesh"] = {"anyOf": [{"const": "auto"}, mesh]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "sirara.yaml"}
