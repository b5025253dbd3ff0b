"""What must hold between values of a configuration, and what this version does not run yet.

Both raise a ConfigError whose `where` is the dotted key at fault; `config.load` adds the file and line.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sirara.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from sirara.config.schema import RunConfig

# key, the values that run, what works now
_RUNS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("train.precision", lambda v: v in ("fp64", "fp32", "bf16"), "fp64, fp32 and bf16"),
    ("train.recompute", lambda v: v == "none", "none"),
    ("mesh.pp", lambda v: v == 1, "1; mesh.dp and mesh.zero=1 split a run"),
    ("mesh.cp", lambda v: v == 1, "1"),
    (
        "mesh.tp",
        lambda v: v == 1,
        "1; mesh.dp and mesh.zero=1 split a run",
    ),
    ("mesh.ep", lambda v: v == 1, "1"),
    ("mesh.zero", lambda v: v in (0, 1), "0 (everything on each rank) and 1 (optimizer state split over dp)"),
    ("mesh.schedule", lambda v: v == "1f1b", "1f1b, on one stage"),
    ("mesh.virtual_stages", lambda v: v == 1, "1"),
    ("mesh.split", lambda v: v == "auto", "auto"),
    ("offload.optimizer", lambda v: v == "none", "none"),
    ("offload.params", lambda v: v == "none", "none"),
    ("offload.activations", lambda v: v == "none", "none"),
    ("offload.path", lambda v: v is None, "null"),
    ("offload.host_budget", lambda v: v is None, "null"),
    ("checkpoint.async", lambda v: v is False, "false: a save returns when it is durable"),
    ("checkpoint.tiers", lambda v: v == ["disk"], "[disk]"),
    ("launch.nodes", lambda v: v == 1, "1; for many machines start `sirara run` under torchrun or srun"),
    ("log.sinks", lambda v: v == [], "[]: metrics are in metrics.jsonl of the run"),
)


def runs_now(config: "RunConfig") -> None:
    """Refuses what the schema knows but this version does not run.

    Raises:  ConfigError naming the key and what works now.
    """
    for key, runs, now in _RUNS:
        value = value_of(config, key)
        if not runs(value):
            raise ConfigError(
                f"{key}={_yaml(value)} does not run yet", code="SR120", where=key, try_=[f"works now: {now}"]
            )


def values_fit(config: "RunConfig") -> None:
    """Checks between keys that need no file.

    Raises:  ConfigError or LayoutError naming the keys, the numbers and values that would fit.
    """
    for test in (_batch, _schedule, _optimizer, _mesh, _model_source, _names):
        test(config)


def value_of(config: "RunConfig", key: str) -> Any:
    """The value at a dotted key as the file spells it."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, {"async": "async_", "from": "from_", "schema": "schema_"}.get(part, part))
    return value


def _batch(config: "RunConfig") -> None:
    batch, micro = config.train.global_batch, config.train.micro_batch
    if batch % micro:
        near = sorted({batch // micro * micro, -(-batch // micro) * micro} - {0})
        raise ConfigError(
            f"train.micro_batch={micro} does not divide train.global_batch={batch}",
            where="train.micro_batch",
            why=f"a step is a whole number of microbatches, {batch} / {micro} = {batch / micro:.2f}",
            try_=[
                f"train.micro_batch={_divisor_below(batch, micro)}",
                *(f"train.global_batch={n}" for n in near),
            ],
        )


def _schedule(config: "RunConfig") -> None:
    steps, schedule = config.train.steps, config.train.lr_schedule
    if schedule.name != "wsd" and schedule.decay_steps:
        raise ConfigError(
            f"train.lr_schedule.decay_steps={schedule.decay_steps} has no meaning for {schedule.name}",
            where="train.lr_schedule.decay_steps",
            try_=["leave it out", "train.lr_schedule.name=wsd"],
        )
    if schedule.name == "constant" and schedule.min_lr_ratio:
        raise ConfigError(
            f"train.lr_schedule.min_lr_ratio={schedule.min_lr_ratio} has no meaning for constant",
            where="train.lr_schedule.min_lr_ratio",
            try_=["leave it out", "train.lr_schedule.name=cosine"],
        )
    if schedule.warmup_steps + schedule.decay_steps > steps:
        key = "warmup_steps" if schedule.warmup_steps > steps or not schedule.decay_steps else "decay_steps"
        raise ConfigError(
            f"train.lr_schedule.{key}={getattr(schedule, key)} does not fit into train.steps={steps}",
            where=f"train.lr_schedule.{key}",
            why=f"warmup_steps={schedule.warmup_steps} + decay_steps={schedule.decay_steps} > {steps}",
        )


def _optimizer(config: "RunConfig") -> None:
    optimizer = config.train.optimizer
    if optimizer.name == "lion" and optimizer.eps != type(optimizer).model_fields["eps"].default:
        raise ConfigError(
            f"train.optimizer.eps={optimizer.eps} has no meaning for lion",
            where="train.optimizer.eps",
            try_=["leave it out", "train.optimizer.name=adamw"],
        )


def _mesh(config: "RunConfig") -> None:
    mesh, launch = config.mesh, config.launch
    others = mesh.pp * mesh.cp * mesh.tp
    if launch.nproc == "auto":
        return
    world = launch.nproc * launch.nodes
    degree = world // others if mesh.dp == "auto" else mesh.dp
    if degree * others != world:
        key = "mesh.dp" if mesh.dp != "auto" else "launch.nproc"
        raise LayoutError(
            f"mesh.dp={mesh.dp} does not fit launch.nproc={launch.nproc}",
            where=key,
            why=f"the mesh asks for {max(1, degree) * others} processes, launch for {world}",
            try_=["mesh.dp=auto", "launch.nproc=auto"],
        )


def _model_source(config: "RunConfig") -> None:
    model = config.model
    if model.preset and model.from_:
        raise ConfigError("model.preset and model.from exclude each other", where="model.from")
    if model.preset and model.family:
        raise ConfigError(
            f"model.family={model.family} cannot be given beside model.preset={model.preset}",
            where="model.family",
            try_=["leave model.family out"],
        )
    if not model.preset and not model.from_:
        missing = [name for name in REQUIRED_SIZES if getattr(model, name) is None]
        if missing:
            raise ConfigError(
                f"model.{missing[0]} is missing",
                where="model",
                why=f"without a preset a model needs {', '.join(REQUIRED_SIZES)}",
                try_=[f"model.{missing[0]}=...", "model.preset=llama3-8b", "model.from=FOLDER"],
            )


def _names(config: "RunConfig") -> None:
    if config.name == "latest":
        raise ConfigError("name=latest is taken: `latest` means the newest run", where="name")
    seen: dict[str, int] = {}
    for i, source in enumerate(config.data.eval):
        if source.name in seen:
            raise ConfigError(
                f"data.eval.{i}.name={source.name} is the name of data.eval.{seen[source.name]} too",
                where=f"data.eval.{i}",
                try_=[f"data.eval.{i}.name={source.name}-2"],
            )
        seen[source.name] = i


REQUIRED_SIZES = ("family", "layers", "hidden", "heads", "max_seq")
SIZES = (
    *REQUIRED_SIZES,
    *("kv_heads", "head_dim", "ffn", "vocab", "tie_embeddings", "norm_eps", "rope_theta", "rope_scaling"),
    *("sliding_window", "attention_bias", "mlp_bias"),
)


def _divisor_below(number: int, near: int) -> int:
    return max(d for d in range(1, min(near, number, 65_536) + 1) if number % d == 0)


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return "null" if value is None else str(value)
