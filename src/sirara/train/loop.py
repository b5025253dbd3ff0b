"""The standard loop: step, log, evaluate, save, until the last step or a requested stop.

Everything it uses is what Trainer offers to a loop of the user's own.  Rank 0 alone writes events and metrics; what
all ranks decide by (steps, requests) is agreed inside the step, so they take every branch together.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sirara.checkpoint.job import SaveOutcome
from sirara.checkpoint.restore import Restored
from sirara.config.run_folder import RunFolder
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError, SiraraError
from sirara.events import JsonLines
from sirara.pure.families import parameter_count
from sirara.pure.split import blocks_per_stage
from sirara.train.own_loop import Trainer
from sirara.train.saving import GIVE_UP, SAVE, STOP
from sirara.train.step import StepResult

_log = logging.getLogger("sirara")
_CODES = {"": 0, "save": SAVE, "stop": STOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended; `checkpoint` is the committed folder of `step`."""

    reason: Literal["done", "stopped"]
    step: int
    loss: float
    digest: str
    tokens: int
    grade: str
    checkpoint: Path | None


def train(
    config: RunConfig,
    run: RunFolder,
    *,
    attempt: int,
    resume: bool,
    requests: Callable[[], str],
    alive: Callable[[], object] = lambda: None,
    deadline: Callable[[], float | None] = lambda: None,
) -> Outcome:
    """Trains to the last step, or stops on request after a committed checkpoint.

    Args:  requests: asked once per step on every rank: "", "save" or "stop".
           alive: called while an evaluation goes on, whose length nothing limits.
           deadline: epoch seconds at which this process will be gone; it stops and saves before.
    """
    with Trainer(config, run, attempt=attempt) as trainer:
        journal = _Journal(config, run, attempt, trainer)
        if resume:
            restored = trainer.resume()
            if restored.step > config.train.steps:
                raise ConfigError(
                    f"the run has done {restored.step} steps already, train.steps={config.train.steps}",
                    code="SR122",
                    try_=[f"train.steps={2 * restored.step}", f"sirara export {run.id} OUT"],
                )
            journal.resumed(restored)
        else:
            trainer.start()
            journal.started()
        return _run(config, trainer, journal, requests, alive, deadline)


def _run(
    config: RunConfig,
    trainer: Trainer,
    journal: "_Journal",
    requests: Callable[[], str],
    alive: Callable[[], object] = lambda: None,
    deadline: Callable[[], float | None] = lambda: None,
) -> Outcome:
    while trainer.step < config.train.steps:
        wish = trainer.saves.wish(deadline=deadline(), step_s=trainer.timings.get("time/step_s", 0.0))
        result = trainer.train_step(request=max(_CODES[requests()], wish))
        last = trainer.step == config.train.steps
        journal.saves(trainer.saves.ended())
        if result.skipped:
            journal.skipped(result)
        evals: dict[str, float] = {}
        # A stop comes before an evaluation, which may take longer than the patience of whoever asked.
        if last or (_due(trainer.step, config.train.eval_every) and result.request < STOP):
            journal.evaluates()
            evals = trainer.evaluate(alive=alive)
        # Before the save: a kill right after its commit must not leave a step without a record.
        journal.step(result, evals)
        if result.request == GIVE_UP:
            raise trainer.saves.give_up(alive=alive)
        if last or result.request == STOP:
            try:
                digest = str(trainer.save(deadline=deadline(), alive=alive))
            finally:
                journal.saves(trainer.saves.ended())
            return journal.end("done" if last else "stopped", digest)
        tiers = trainer.saves.due(requested=result.request == SAVE)
        if tiers or result.request == SAVE:
            trainer.saves.begin(tiers=tiers, alive=alive)
            journal.saves(trainer.saves.ended())
    return journal.end("done", str(trainer.digest()))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


class _Journal:
    """What rank 0 writes down; silent on the others."""

    def __init__(self, config: RunConfig, run: RunFolder, attempt: int, trainer: Trainer) -> None:
        self.config, self.trainer, self.run = config, trainer, run
        self.speaks = trainer.world.rank == 0
        self.events = JsonLines(run.events, patient=True, attempt=attempt) if self.speaks else None
        self.metrics = JsonLines(run.metrics, patient=True, attempt=attempt) if self.speaks else None
        self.told = 0

    def event(self, kind: str, **fields: object) -> None:
        if self.events is not None:
            # A stop record must outlive the machine: the supervisor's exit code stands on it.
            self.events.append({"kind": kind, **fields}, durable=kind in ("stop", "done", "resume"))

    def started(self) -> None:
        self.event("start", layout=self.trainer.layout, nodes=self._nodes, grade=self.trainer.grade.name)
        self._tell_layout()

    @property
    def _nodes(self) -> int:
        """Whose memory a resume like this one asks."""
        return -(-self.trainer.world.size // self.trainer.world.local_size)

    def _tell_layout(self) -> None:
        if self.speaks:
            layout, train = self.trainer.layout, self.config.train
            _log.info(
                "%d parameters, pp %d x dp %d x tp %d, ZeRO %d; a step is %d microbatches, added in blocks of %d",
                parameter_count(self.trainer.shape),
                layout["pp"],
                layout["dp"],
                layout["tp"],
                layout["zero"],
                train.global_batch // train.micro_batch,
                layout["block"],
            )
            stage, deal = self.trainer.stepper.stage, self.trainer.deal
            if layout["pp"] > 1:
                _log.info(
                    "schedule %s, layers per stage %s, stages on pipeline ranks %s",
                    self.config.mesh.schedule,
                    blocks_per_stage(stage.split),
                    [stage.homes[part.start] for part in stage.split],
                )
            idle = sum(not deal.mine(rank) for rank in range(deal.dp))
            if idle:
                _log.warning(
                    "%d of %d data-parallel ranks have no microbatch: a step has %d in blocks of %d",
                    idle,
                    deal.dp,
                    deal.microbatches,
                    layout["block"],
                )

    def resumed(self, restored: Restored) -> None:
        step, grade = restored.step, self.trainer.grade
        self.event(
            "resume",
            from_step=step,
            grade=grade.name,
            why=list(grade.why),
            layout=self.trainer.layout,
            nodes=self._nodes,
            skipped=[list(pair) for pair in restored.skipped],
            sources=[[row.step, row.tier, row.what, row.why] for row in restored.table],
        )
        if self.speaks:
            _log.info("resumed from step %d, grade %s", step, grade)
        self._tell_layout()

    def skipped(self, result: StepResult) -> None:
        self.event("skip", step=self.trainer.step, parameter=result.bad_parameter)
        if self.speaks:
            _log.warning(
                "step %d skipped: the gradient of %s is not finite; nothing was updated (%d skipped so far)",
                self.trainer.step,
                result.bad_parameter,
                self.trainer.state.counters.skipped,
            )

    def evaluates(self) -> None:
        batches = sum(len(one) for one in self.trainer.eval_sets.values())
        if self.speaks and batches:
            _log.info("step %d: evaluating %d batches", self.trainer.step, batches)

    def saves(self, outcomes: list[SaveOutcome]) -> None:
        """What became of saves since the last step."""
        for outcome in outcomes:
            if outcome.fault is not None:
                self._save_failed(outcome, outcome.fault)
            elif outcome.kind in ("saved", "uploaded"):
                self._saved(outcome, "save" if outcome.kind == "saved" else "upload")
            else:
                self.event(
                    "save_skipped", step=outcome.step, why=outcome.why, put_off=outcome.kind == "queued"
                )
                if self.speaks:
                    _log.info("the checkpoint of step %d is %s: %s", outcome.step, outcome.kind, outcome.why)

    def _saved(self, outcome: SaveOutcome, kind: str) -> None:
        tiers = {name: "kept" if result.ok else result.fault for name, result in outcome.tiers.items()}
        seconds = {name: round(value, 6) for name, value in outcome.seconds.items()}
        untold = {"untold": outcome.untold} if outcome.untold else {}
        self.event(kind, step=outcome.step, digest=outcome.digest, tiers=tiers, seconds=seconds, **untold)
        if self.speaks and outcome.untold:
            _log.info(
                "the checkpoint of step %d is kept; %d more were queued before it",
                outcome.step,
                outcome.untold,
            )
        for name, result in outcome.tiers.items():
            if self.speaks and not result.ok:
                _log.warning("step %d is not kept in tier %s: %s", outcome.step, name, result.fault)

    def _save_failed(self, outcome: SaveOutcome, error: SiraraError) -> None:
        untold = {"untold": outcome.untold} if outcome.untold else {}
        self.event("save_failed", step=outcome.step, error=str(error), in_a_row=outcome.in_a_row, **untold)
        if self.speaks:
            _log.error(
                "the checkpoint of step %d could not be written (%d in a row, %d end the run); older ones are kept\n%s",
                outcome.step,
                outcome.in_a_row,
                self.config.checkpoint.max_failures,
                error,
            )

    def step(self, result: StepResult, evals: dict[str, float]) -> None:
        if self.metrics is None:
            return
        trainer, counters = self.trainer, self.trainer.state.counters
        seconds = trainer.timings["time/step_s"]
        shown = trainer.step % self.config.log.every == 0 or trainer.step == self.config.train.steps
        self.metrics.append(
            {
                "step": trainer.step,
                "train/loss": result.loss,
                "train/loss_hex": result.loss.hex(),
                "train/grad_norm": result.grad_norm,
                "train/grad_norm_hex": result.grad_norm.hex(),
                "train/lr": result.lr,
                "train/tokens_total": counters.tokens,
                "throughput/tokens_per_s": result.target_tokens / seconds,
                "memory/peak_bytes": trainer.peak_bytes,
                **trainer.timings,
                **{f"eval/{name}/loss": value for name, value in evals.items()},
                **(self._plan_errors() if shown else {}),
            }
        )
        if shown:
            _log.info(
                "step %d/%d  loss %.4f  norm %.3f  lr %.2e  %d tokens/s%s",
                trainer.step,
                self.config.train.steps,
                result.loss,
                result.grad_norm,
                result.lr,
                result.target_tokens / seconds,
                "".join(f"  {name} {value:.4f}" for name, value in evals.items()),
            )

    def _plan_errors(self) -> dict[str, float]:
        """How wrong the plan is so far; the whole grade is an event now and then, should the end not be written."""
        found = self.trainer.plan_grade()
        self.told += 1
        if found is None:
            return {}
        if self.told >= 4 and not self.told & (self.told - 1):
            self.event("plan_grade", step=self.trainer.step, plan=found.as_record())
        return found.errors()

    def _grade_plan(self) -> None:
        found = self.trainer.plan_grade(wait=True)
        if found is not None:
            self.event("plan_grade", step=self.trainer.step, plan=found.as_record())
            for line in found.wrong:
                _log.info("mispredicted: %s", line)

    def end(self, reason: Literal["done", "stopped"], digest: str) -> Outcome:
        """Writes down that the attempt is over and says how."""
        trainer = self.trainer
        self._grade_plan()
        self.event("stop" if reason == "stopped" else "done", step=trainer.step, digest=digest)
        folder = self.run.checkpoints / f"step-{trainer.step:09d}"
        return Outcome(
            reason=reason,
            step=trainer.step,
            loss=trainer.loss,
            digest=digest,
            tokens=trainer.state.counters.tokens,
            grade=trainer.grade.name,
            checkpoint=folder if folder.is_dir() else None,
        )
