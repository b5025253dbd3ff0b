"""Trainer: everything a training loop needs, for a loop of the user's own.  `train.loop` uses nothing else.

with Trainer(config, run, attempt=1) as trainer:
    trainer.start()                                # or trainer.resume()
    while trainer.step < config.train.steps:
        result = trainer.train_step()
        if trainer.step % 100 == 0:
            trainer.save()
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from sirara.checkpoint.digest import Digest
from sirara.checkpoint.export import with_generation_files
from sirara.checkpoint.find import find
from sirara.checkpoint.hf import HfReader, hf_config
from sirara.checkpoint.manager import PlannedTensor, State
from sirara.checkpoint.partial import WeightsReport
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.restore import Restored
from sirara.comm.world import World, connect, connect_axes, disconnect
from sirara.config.load import model_shape, weights_folder
from sirara.config.run_folder import RunFolder
from sirara.config.schema import RunConfig
from sirara.data.batches import Batches, EvalBatches
from sirara.device import open_device
from sirara.errors import CheckpointError, ConfigError, StorageError
from sirara.events import live, read
from sirara.mesh import build_mesh
from sirara.plan.grading import RunGrade
from sirara.pure.families import TensorSpec, init_slice
from sirara.pure.rng import DropoutKey
from sirara.train.assemble import assemble, specs_of
from sirara.train.batch import to_inputs
from sirara.train.checkpoints import open_manager, read_newest
from sirara.train.compare import PATIENCE_S, Attempt, Comparison
from sirara.train.evaluate import evaluate
from sirara.train.grade import Grade, arithmetic, grade
from sirara.train.lr import lr_at
from sirara.train.meter import Meter
from sirara.train.precision import precision_of
from sirara.train.saving import Saves
from sirara.train.step import StepResult
from sirara.train.voices import Voices


class Trainer:
    """One rank's share of a run, from configuration to checkpoints.

    Attributes:  state: the one owner of what is resumed.  comm, device: where this rank stands.
                 stepper: the step pipeline and this rank's stages.  deal: who computes which microbatch.
                 loss: of the last step.  grade: how equal the run is to an uninterrupted one.
                 saves: when and where it is saved, and how that ended.  meter: what this rank measures of its steps.
                 comparison: on rank 0, from `start` or `resume` on, the plan of this attempt beside what is measured.
                 timings: seconds of the last step by name ("time/step_s", "time/data_wait_s"), and of the saves
                 between it and the one before ("time/ckpt_stall_s").
    """

    def __init__(
        self, config: RunConfig, run: RunFolder, *, attempt: int, world: World | None = None
    ) -> None:
        self.config, self.run = config, run
        self.world = world or World.from_environment()
        self.device = open_device(local_rank=self.world.local_rank, exact=config.numerics == "exact")
        timeout_s = config.launch.hang_timeout
        connect(self.world, backend="nccl" if self.device.kind == "cuda" else "gloo", timeout_s=timeout_s)
        mesh = config.mesh
        self.mesh = build_mesh(
            world=self.world.size, rank=self.world.rank, pp=mesh.pp, dp=mesh.dp, cp=mesh.cp, tp=mesh.tp
        )
        self.comms = connect_axes(self.world, self.mesh.groups(), timeout_s=timeout_s)
        self.comm = self.comms.world
        self.meter = Meter(
            self.device,
            self.comms,
            self.mesh,
            held_bytes=lambda: sum(nbytes for _, nbytes in self.state.zero.bytes_held()),
            compiled=config.train.compile,
        )
        self.comparison: Comparison | None = None
        self.grade = Grade("exact" if config.numerics == "exact" else "close", ())
        self.timings: dict[str, float] = {}
        self.loss = math.nan
        self.tokenizer, self.vocab = Batches.tokenizer_of(config.data)
        self.shape = model_shape(config, self.vocab)
        self.specs = specs_of(config, self.shape)
        self._build()
        self._plan: list[PlannedTensor] | None = None
        self._hf: dict[str, bytes] | None = None
        self._voices = Voices(self.comm, self.device.torch_device)
        self.manager = open_manager(config, run, attempt=attempt, world=self.world, voices=self._voices)
        self.saves = Saves(
            self,
            self.manager,
            run=run,
            config=config.checkpoint,
            gather=self._voices.rows,
            speaks=self.world.rank == 0,
        )
        self._arithmetic = arithmetic(
            config, device=self.device.model, threads=torch.get_num_threads(), layout=self.layout
        )

    def _build(self) -> None:
        built = assemble(
            self.config,
            self.shape,
            self.specs,
            mesh=self.mesh,
            comms=self.comms,
            device=self.device.torch_device,
        )
        self.deal, self.stepper, self.state = built.deal, built.stepper, built.state

    # ---- beginnings

    def start(self) -> None:
        """Step 0: initial weights by seed, or those of `model.from`; refused when the run has committed steps."""
        steps = self.manager.newest()
        if steps:
            raise CheckpointError(
                f"run {self.run.id} has {len(steps)} committed steps; starting from 0 would lose them",
                code="SR540",
                why=f"the newest is step {steps[0]}",
                try_=[f"sirara resume {self.run.id}"],
            )
        self._open_data(None)
        if self.config.model.from_ is not None:
            reader = HfReader(weights_folder(Path(self.config.model.from_)))
            self.state.zero.initialise(lambda spec, a, b: reader.read_slice(spec.name, a, b))
        else:
            self.state.zero.initialise(self._drawn)
        self.saves.prepare()
        self._compare()

    def resume(self) -> Restored:
        """Continues from the newest committed step that is complete and intact, or starts when there is none.

        Returns:  the step, and the newer ones that could not be read, each with its reason.
        Raises:   CheckpointError when steps exist but none can be read, or when what was loaded is not what was saved.
        """
        found = read_newest(
            self.state,
            self.manager,
            config=self.config,
            run=self.run,
            world=self.world,
            voices=self._voices,
        )
        if found is None:
            self.run.check_nothing_kept()
            self.start()
            return Restored(step=0, skipped=())
        snapshot, restored = found
        self._remember_scores()
        self.saves.prepare()
        self._compare()
        self.state.complete()
        record = snapshot.record
        self._open_data(record["data"])
        self.loss = float.fromhex(record["loss"])
        self.grade = grade(record["arithmetic"], self._arithmetic)
        saved, live = record["digest"], str(self.state.digest())
        same_tensors = record["arithmetic"].get("train.precision") == self._arithmetic.get("train.precision")
        if same_tensors and saved != live:
            raise CheckpointError(
                f"the state loaded from step {snapshot.step} is not the state that was saved",
                code="SR541",
                why=f"digest {saved} was saved, {live} is live",
                where=str(snapshot.path),
                try_=["sirara ckpt verify", f"remove {snapshot.path} to continue from an older step"],
            )
        ids = self.batches.ids_digest(self.state.counters.samples, self.config.train.global_batch)
        if self.batches.change:
            self.grade = Grade("close", (*self.grade.why, self.batches.change))
        elif self.grade.name == "exact" and ids != record["next_batch"]:
            raise CheckpointError(
                f"the next batch after step {snapshot.step} would not hold the samples that were due",
                code="SR543",
                why=f"sample ids digest to {ids}, {record['next_batch']} was saved",
            )
        return restored

    def _compare(self) -> None:
        """Begins to plan this attempt."""
        if self.world.rank == 0:
            attempt = Attempt(
                folder=self.run.path,
                number=self.manager.attempt,
                config=self.config,
                shape=self.shape,
                kind="cuda" if self.device.kind == "cuda" else "cpu",
                device=self.device.model,
                ranks=self.world.size,
                ranks_per_node=self.world.local_size,
                dp=self.mesh.dp,
                block=self.layout["block"],
            )
            self.comparison = Comparison(attempt, self.meter.measured)

    def _drawn(self, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(init_slice(spec, self.config.seed, start, stop))

    def _open_data(self, state: dict[str, Any] | None) -> None:
        data, seed, micro = self.config.data, self.config.seed, self.config.train.micro_batch
        first = self.state.counters.samples
        self.batches = Batches(
            data, seed=seed, micro_batch=micro, vocab=self.shape.vocab, state=state, first=first
        )
        self.eval_sets = {
            e.name: EvalBatches(e.path, seq_len=data.seq_len, micro_batch=micro, vocab=self.shape.vocab)
            for e in data.eval
        }
        self.batches.prefetch(first, self.deal.mine(self.mesh.coordinate("dp")))

    def load_weights(
        self, source: str, *, names: Sequence[str] = ("*",), strict: bool = True, grow: bool = False
    ) -> WeightsReport:
        """After `start`: weights of another run, or of a step folder, into this model; all else stays as it is.

        Args:    source: a step folder, or a run's name or folder, whose newest step is read.
                 names, strict, grow: as in checkpoint/partial.py.
        Returns: what was taken, what was missing, what had no place.
        Raises:  CheckpointError or ConfigError on all ranks, before anything has changed unless bytes are bad.
        """
        fault, opened = "", None
        try:
            opened = Snapshot(find(source).path(None))
        except (CheckpointError, ConfigError, StorageError) as error:
            fault = error.what
        fault = self._voices.first_fault(fault)
        if opened is None or fault:
            raise CheckpointError(f"the weights of {source} cannot be loaded: {fault}", code="SR525")
        report = self.state.load_weights(
            opened, names=names, strict=strict, grow=grow, agree=self._voices.first_fault
        )
        self.state.complete()
        return report

    # ---- the step

    @property
    def step(self) -> int:
        """Steps done so far, skipped ones included."""
        return self.state.counters.step

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        train, schedule = self.config.train, self.config.train.lr_schedule
        return lr_at(
            self.state.counters.updates,
            name=schedule.name,
            lr=train.optimizer.lr,
            total=train.steps,
            warmup_steps=schedule.warmup_steps,
            min_lr_ratio=schedule.min_lr_ratio,
            decay_steps=schedule.decay_steps,
        )

    def train_step(self, *, request: int = 0) -> StepResult:
        """One optimizer step over one global batch.

        Args:  request: 0, SAVE or STOP as this rank wishes; `result.request` is what all ranks agreed on.
        """
        if self.manager.busy:
            self.meter.disturb()
        with self.meter.step():
            result = self._train_step(request)
        self.timings["time/ckpt_stall_s"] = self.saves.take_stall_s()
        if self.manager.busy or result.skipped or self.timings["time/ckpt_stall_s"] > 0:
            self.meter.disturb()
        self.meter.close_step(step_s=self.timings["time/step_s"], data_s=self.timings["time/data_wait_s"])
        return result

    def _train_step(self, request: int) -> StepResult:
        began, counters = time.perf_counter(), self.state.counters
        batch, mine = self.config.train.global_batch, self.deal.mine(self.mesh.coordinate("dp"))
        inputs = {
            i: to_inputs(self.batches.microbatch(counters.samples, i), self.device.torch_device) for i in mine
        }
        self.batches.prefetch(counters.samples + batch, mine)
        valid = self.batches.valid_targets(counters.samples, batch)
        self.meter.lap()
        losses = self.stepper.accumulate(inputs, valid_targets=valid, keys=self._keys(mine))
        self.meter.lap()
        # A snapshot may have been taken beside the backward; the update must not overtake it.
        self.manager.fence()
        result = self.stepper.finish(
            losses,
            valid_targets=valid,
            lr=self.lr,
            update=counters.updates + 1,
            request=request,
            facts=self.meter.facts,
            hear=self.meter.hear,
        )
        self.loss = result.loss
        counters.step += 1
        counters.samples += batch
        counters.tokens += valid
        counters.updates += not result.skipped
        counters.skipped += result.skipped
        self.timings = {
            "time/step_s": time.perf_counter() - began,
            "time/data_wait_s": self.batches.take_waited_s(),
        }
        return result

    @property
    def peak_bytes(self) -> int:
        """Peak memory of this process: allocated on an accelerator, resident on the CPU."""
        return self.meter.peak_bytes

    def plan_grade(self, *, wait: bool = False) -> RunGrade | None:
        """On rank 0: how right the plan of this attempt has been so far; None while there is none, and on other ranks.

        Args:  wait: for a plan that is still being made, for a moment.
        """
        return self.comparison and self.comparison.grade(wait_s=PATIENCE_S if wait else 0.0)

    def _keys(self, mine: list[int]) -> dict[int, DropoutKey] | None:
        if not (self.config.model.dropout or self.config.model.attention_dropout):
            return None
        seed, step = self.config.seed, self.state.counters.step
        return {i: DropoutKey(seed=seed, step=step, microbatch=i) for i in mine}

    def evaluate(self, *, alive: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Loss per target token of every evaluation set, by name; nothing of the run changes.

        Args:  alive: called after each batch.
        """
        self.meter.disturb()
        losses = {
            name: evaluate(self.stepper.stage, batches, mesh=self.mesh, alive=alive)
            for name, batches in self.eval_sets.items()
        }
        best = self.config.checkpoint.keep_best
        if best is not None:
            self.manager.scores[self.step] = losses[best.split("/")[1]]
        return losses

    def _remember_scores(self) -> None:
        """What earlier attempts have measured: the best step may be one of theirs."""
        best = self.config.checkpoint.keep_best
        if best is not None and self.world.rank == 0:
            rows = live(read(self.run.metrics), read(self.run.events))
            self.manager.scores |= {int(r["step"]): float(r[best]) for r in rows if r.get(best) is not None}

    # ---- checkpoints

    @property
    def layout(self) -> dict[str, int]:
        """Degrees, ZeRO stage and microbatches per block of the reduction, as they are stored in checkpoints."""
        mesh = self.mesh
        return {
            "world": self.world.size,
            "pp": mesh.pp,
            "dp": mesh.dp,
            "cp": mesh.cp,
            "tp": mesh.tp,
            "zero": self.config.mesh.zero,
            "block": 1 << self.deal.k,
        }

    def digest(self) -> Digest:
        """The state digest: one value for one logical state, whatever the layout."""
        return self.state.digest()

    def save(self, *, deadline: float | None = None, alive: Callable[[], object] = lambda: None) -> Digest:
        """Saves the state of the step just done in all tiers and waits until it is committed: see `Saves.write`."""
        return self.saves.write(deadline=deadline, alive=alive)

    def snapshot(self) -> State:
        """What a save of this step holds; replicas are compared first.

        Raises:  InvariantError on all ranks when copies of one tensor have drifted apart.
        """
        self.state.check_replicas()
        counters = self.state.counters
        record = self.state.record() | {
            "loss": self.loss.hex(),
            "lr": self.lr,
            "seed": self.config.seed,
            "optimizer": self.config.train.optimizer.model_dump(mode="json"),
            "data": self.batches.state_at(counters.samples),
            "next_batch": self.batches.ids_digest(counters.samples, self.config.train.global_batch),
            "arithmetic": self._arithmetic,
            "layout": self.layout,
        }
        if not self.manager.uses_keeper:
            # A keeper takes it of the pieces, while the training goes on.
            record["digest"] = str(self.digest())
        return State(
            plan=self.save_plan(),
            ranges=self.state.ranges(),
            record=record,
            hf_files=self._hf_files(),
            aliases={t.name: t.tied_to for unit in self.specs for t in unit.tensors if t.tied_to},
        )

    def save_plan(self) -> list[PlannedTensor]:
        """All tensors of the state and who holds which boxes of them."""
        if self._plan is None:
            self._plan = self.state.plan()
        return self._plan

    def _hf_files(self) -> dict[str, bytes]:
        """What makes the step folder a model that generates: config, tokenizer and their like."""
        if self._hf is None:
            dtype = precision_of(self.config.train.precision).weights
            files = {"config.json": json.dumps(hf_config(self.shape, dtype)).encode()}
            if self.tokenizer is not None:
                files["tokenizer.json"] = self.tokenizer.read_bytes()
            self._hf = with_generation_files(files)
        return self._hf

    def close(self, *, clean: bool = False) -> None:
        """Ends what this trainer has started and leaves the process group; clean: see `end`."""
        self.end(clean=clean)
        disconnect()

    def end(self, *, clean: bool = False) -> None:
        """Ends threads and the keeper, and stays in the process group.

        clean: the work is done; otherwise the keeper finishes what it has in hand by itself.
        """
        comparison: Comparison | None = getattr(self, "comparison", None)
        if comparison is not None:
            comparison.close()
        if hasattr(self, "manager"):
            self.manager.close(clean=clean)
        if hasattr(self, "batches"):
            self.batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.comm.alarm is not None:
            # The other ranks wait for this one: they hear why it leaves.
            self.comm.alarm.leave(error)
        # What memory alone holds must outlive this attempt.
        self.close(clean=error is None and self.saves.on_disk)
