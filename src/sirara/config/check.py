"""What must hold between values of a configuration, and what this version does not run yet.

Each raises a ConfigError whose `where` is the dotted key at fault; `config.load` adds the file and line.
`runs_now` and `values_fit` need the configuration alone, `check_layout` the sizes of the model as well; the tiers
of checkpoints have a file of their own (check_tiers.py).
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Any

from sirara.errors import ConfigError, LayoutError
from sirara.pure.families import ModelShape, UnitSpec, unit_specs
from sirara.pure.recompute import FULL, MODULES, all_kinds, kinds_of_blocks, most_blocks, recipe_of
from sirara.pure.schedule import SPLIT_BACKWARD, chunks_of, rank_of
from sirara.pure.split import blocks_per_stage, split_units, unit_costs

if TYPE_CHECKING:
    from sirara.config.schema import RunConfig

# key, the values that run, what works now
_RUNS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("train.precision", lambda v: v in ("fp64", "fp32", "bf16"), "fp64, fp32 or bf16"),
    ("mesh.cp", lambda v: v == 1, "1"),
    ("mesh.ep", lambda v: v == 1, "1"),
    ("offload.optimizer", lambda v: v == "none", "none"),
    ("offload.params", lambda v: v == "none", "none"),
    ("offload.activations", lambda v: v == "none", "none"),
    ("offload.path", lambda v: v is None, "null"),
    ("offload.host_budget", lambda v: v is None, "null"),
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
                f"{key}={as_yaml(value)} does not run yet",
                code="SR120",
                where=key,
                try_=[f"{key}={now}"],
            )


def values_fit(config: "RunConfig") -> None:
    """Checks between keys that need no file.

    Raises:  ConfigError or LayoutError naming the keys, the numbers and values that would fit.
    """
    for test in (_batch, _lr_schedule, _optimizer, _mesh, _pipeline, _sharding, _model_source, _names):
        test(config)


def check_layout(config: "RunConfig", shape: ModelShape) -> None:
    """Checks between the mesh, the kind of training and the sizes of the model.

    Raises:  LayoutError or ConfigError naming the keys, the numbers and valid alternatives.
    """
    for test in (_tensor_parallel, _tokens, _stages, _split):
        test(config, shape)
    if config.train.freeze:
        frozen_names(config.train.freeze, unit_specs(shape))


def frozen_names(globs: Sequence[str], units: Sequence[UnitSpec]) -> frozenset[str]:
    """Names of the logical tensors that `train.freeze` takes out of training.

    Raises:  ConfigError for a glob that matches no tensor, or when nothing is left to train.
    """
    tensors = [t for unit in units for t in unit.tensors]
    names = [t.name for t in tensors if t.tied_to is None]
    aliases = {t.name: t.tied_to for t in tensors if t.tied_to is not None}
    frozen: set[str] = set()
    for glob in globs:
        found = [name for name in names if fnmatchcase(name, glob)]
        if not found:
            owners = [owner for alias, owner in aliases.items() if fnmatchcase(alias, glob)]
            raise ConfigError(
                f"train.freeze: {glob} matches no tensor of the model",
                where="train.freeze",
                why=f"that tensor is {owners[0]}, tied" if owners else f"tensors are called {names[0]} ...",
                try_=owners[:1] or get_close_matches(glob, names, n=3, cutoff=0.3),
            )
        frozen.update(found)
    if len(frozen) == len(names):
        raise ConfigError(
            f"train.freeze={as_yaml(list(globs))} leaves nothing to train",
            where="train.freeze",
            why=f"all {len(names)} tensors match",
        )
    return frozenset(frozen)


def value_of(config: "RunConfig", key: str) -> Any:
    """The value at a dotted key as the file spells it."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, {"async": "async_", "from": "from_", "schema": "schema_"}.get(part, part))
    return value


def as_yaml(value: object) -> str:
    """A value as a file of ours spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return "null" if value is None else str(value)


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


def _lr_schedule(config: "RunConfig") -> None:
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
    for key, names in _KEYS_OF_OPTIMIZERS.items():
        value, default = getattr(optimizer, key), type(optimizer).model_fields[key].default
        if optimizer.name not in names and value != default:
            raise ConfigError(
                f"train.optimizer.{key}={as_yaml(value)} has no meaning for {optimizer.name}",
                where=f"train.optimizer.{key}",
                try_=["leave it out", *(f"train.optimizer.name={name}" for name in names)],
            )


def _mesh(config: "RunConfig") -> None:
    mesh, launch = config.mesh, config.launch
    others = mesh.pp * mesh.cp * mesh.tp
    if launch.nproc == "auto":
        if mesh.dp != "auto":
            _dealt(config, mesh.dp)
        return
    world = launch.nproc * launch.nodes
    degree = world // others if mesh.dp == "auto" else mesh.dp
    if mesh.dp == "auto" and world % others:
        raise LayoutError(
            f"launch.nproc={launch.nproc} does not fit mesh.pp={mesh.pp} * mesh.cp={mesh.cp} * mesh.tp={mesh.tp}",
            where="launch.nproc",
            why=f"the mesh asks for a multiple of {others} processes, launch for {world}",
            try_=[f"launch.nproc={-(-world // others) * others}", "launch.nproc=auto"],
        )
    if degree * others != world:
        raise LayoutError(
            f"mesh.dp={mesh.dp} does not fit launch.nproc={launch.nproc}",
            where="mesh.dp",
            why=f"the mesh asks for {degree * others} processes, launch for {world}",
            try_=[*(["mesh.dp=auto"] if world % others == 0 else []), f"launch.nproc={degree * others}"],
        )
    _dealt(config, degree)


def _dealt(config: "RunConfig", degree: int) -> None:
    """A block of microbatches so large that ranks have nothing to do, which smaller ones would have."""
    block, microbatches = config.mesh.block, config.train.global_batch // config.train.micro_batch
    if block == "auto" or -(-microbatches // block) >= min(degree, microbatches):
        return
    fitting = 1 << max(0, (microbatches // min(degree, microbatches)).bit_length() - 1)
    raise LayoutError(
        f"mesh.block={block} leaves {degree - -(-microbatches // block)} of {degree} data-parallel ranks without work",
        where="mesh.block",
        why=f"a step has {microbatches} microbatches: {-(-microbatches // block)} blocks of {block}",
        try_=["mesh.block=auto", f"mesh.block={fitting}"],
    )


def _pipeline(config: "RunConfig") -> None:
    mesh = config.mesh
    chunks_of(mesh.schedule, mesh.virtual_stages)
    if config.train.compile and mesh.schedule in SPLIT_BACKWARD:
        raise LayoutError(
            f"train.compile=true does not go with mesh.schedule={mesh.schedule}",
            where="train.compile",
            why=f"{mesh.schedule} splits the backward of each linear layer, a compiled block has one backward",
            try_=[
                "train.compile=false",
                "mesh.schedule=interleaved" if mesh.schedule == "zb-v" else "mesh.schedule=1f1b",
            ],
        )
    again = config.train.recompute
    if config.train.compile and any(kinds != FULL for kinds in all_kinds(again)):
        raise ConfigError(
            f"train.compile=true does not go with train.recompute={as_yaml(again)}",
            where="train.recompute",
            why="inside a compiled block the compiler decides what is kept",
            try_=["train.recompute=none", "train.recompute=full", "train.compile=false"],
        )
    if isinstance(again, list) and len(again) != mesh.stages:
        kinds = [str(entry) for entry in again]
        raise LayoutError(
            f"train.recompute={as_yaml(again)} has {len(again)} entries for {mesh.stages} stages",
            where="train.recompute",
            why="a list has a recipe for each stage, virtual ones too; modules of one block are joined by +",
            try_=[f"train.recompute={'+'.join(kinds)}"]
            if all(k in MODULES for k in kinds)
            else [f"train.recompute={as_yaml([again[0] if again else 'none'] * mesh.stages)}"],
        )


def _sharding(config: "RunConfig") -> None:
    mesh = config.mesh
    if mesh.gather == "step" and mesh.zero < 3:
        raise LayoutError(
            f"mesh.gather=step has no meaning for mesh.zero={mesh.zero}",
            where="mesh.gather",
            why="below stage 3 every rank holds the weights of its stage anyway",
            try_=["leave it out", "mesh.zero=3"],
        )
    if mesh.sequence_parallel and mesh.tp == 1:
        raise LayoutError(
            "mesh.sequence_parallel=true has no meaning for mesh.tp=1",
            where="mesh.sequence_parallel",
            why="the tokens are shared among tp ranks",
            try_=["mesh.sequence_parallel=false", "mesh.tp=2"],
        )


def _tokens(config: "RunConfig", _shape: ModelShape) -> None:
    mesh, micro, length = config.mesh, config.train.micro_batch, config.data.seq_len
    if mesh.sequence_parallel and micro * length % mesh.tp:
        step = mesh.tp // gcd(mesh.tp, length)
        raise LayoutError(
            f"mesh.tp={mesh.tp} does not divide the tokens of a microbatch",
            where="mesh.sequence_parallel",
            why=f"train.micro_batch={micro} * data.seq_len={length} = {micro * length} tokens are shared evenly",
            try_=[
                f"train.micro_batch={-(-micro // step) * step}",
                f"data.seq_len={-(-length // mesh.tp) * mesh.tp}",
                "mesh.sequence_parallel=false",
            ],
        )


def _tensor_parallel(config: "RunConfig", shape: ModelShape) -> None:
    def fits(tp: int) -> bool:
        kv = shape.kv_heads
        return not (shape.heads % tp or shape.ffn % tp) and (kv % tp == 0 or tp % kv == 0)

    tp = config.mesh.tp
    if fits(tp):
        return
    reasons = {
        f"does not divide model.heads={shape.heads}": shape.heads % tp,
        f"neither divides model.kv_heads={shape.kv_heads} nor is a multiple of it": shape.kv_heads % tp
        and tp % shape.kv_heads,
        f"does not divide model.ffn={shape.ffn}": shape.ffn % tp,
    }
    first, *others = (reason for reason, wrong in reasons.items() if wrong)
    valid = [d for d in range(1, shape.heads + 1) if fits(d)]
    raise LayoutError(
        f"mesh.tp={tp} {first}",
        where="mesh.tp",
        why="; ".join([*others, f"valid degrees for this model: {', '.join(map(str, valid))}"]),
        try_=[f"mesh.tp={d}" for d in sorted(valid, key=lambda d: abs(d - tp))[:2]],
    )


def _stages(config: "RunConfig", shape: ModelShape) -> None:
    mesh, units = config.mesh, shape.layers + 2
    if mesh.stages <= units:
        return
    raise LayoutError(
        f"mesh.pp={mesh.pp} is more than the model can be cut into",
        where="mesh.pp",
        why=f"{mesh.pp} ranks * {mesh.chunks} virtual stages = {mesh.stages} stages, but there are {units} units: "
        f"the embedding, {shape.layers} layers and the head",
        try_=[f"mesh.pp={units // mesh.chunks}"] if units >= mesh.chunks else ["mesh.schedule=1f1b"],
    )


def _fewer(recipe: str | int, blocks: int) -> str | int:
    """The recipe for no more blocks than there are."""
    if isinstance(recipe, int):
        return min(recipe, blocks)
    dealt = kinds_of_blocks(recipe, stage=0, blocks=blocks)
    return recipe_of([(kinds, len(list(same))) for kinds, same in groupby(dealt)], blocks)


def _split(config: "RunConfig", shape: ModelShape) -> None:
    mesh, units = config.mesh, unit_specs(shape)
    owners = [rank_of(mesh.schedule, mesh.pp, stage) for stage in range(mesh.stages)]
    explicit = None if mesh.split == "auto" else mesh.split
    split = split_units(unit_costs(units, shape.hidden), mesh.stages, explicit, owners=owners)
    layers, again = blocks_per_stage(split), config.train.recompute
    if not isinstance(again, list):
        if most_blocks(again) > max(layers):
            raise ConfigError(
                f"train.recompute={again} is more blocks than any stage has",
                where="train.recompute",
                why=f"layers per stage are {layers}",
                try_=[
                    "train.recompute=full",
                    *([f"train.recompute={_fewer(again, max(layers))}"] if max(layers) else []),
                ],
            )
        return
    for stage, (recipe, blocks) in enumerate(zip(again, layers, strict=True)):
        if most_blocks(recipe) > blocks:
            raise ConfigError(
                f"train.recompute: {as_yaml(recipe)} is more blocks than stage {stage} has",
                where="train.recompute",
                why=f"layers per stage are {layers}",
                try_=[
                    f"train.recompute={as_yaml([_fewer(r, n) for r, n in zip(again, layers, strict=True)])}"
                ],
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


_KEYS_OF_OPTIMIZERS = {
    "eps": ("adamw", "muon"),
    "momentum": ("muon",),
    "nesterov": ("muon",),
    "ns_steps": ("muon",),
}

REQUIRED_SIZES = ("family", "layers", "hidden", "heads", "max_seq")
SIZES = (
    *REQUIRED_SIZES,
    *("kv_heads", "head_dim", "ffn", "vocab", "tie_embeddings", "norm_eps", "rope_theta", "rope_scaling"),
    *("sliding_window", "attention_bias", "mlp_bias"),
)


def _divisor_below(number: int, near: int) -> int:
    return max(d for d in range(1, min(near, number, 65_536) + 1) if number % d == 0)
