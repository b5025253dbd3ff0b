"""The checkpoints of a run as its configuration wants them: who keeps them, and how the newest one is found."""

from functools import partial

from sirara.checkpoint.manager import CheckpointManager
from sirara.checkpoint.node_views import open_nodes
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.restore import Restored, Restorer
from sirara.checkpoint.space import memory_folder
from sirara.comm.world import World
from sirara.config.run_folder import RunFolder
from sirara.config.schema import RunConfig
from sirara.train.state import TrainState
from sirara.train.voices import Voices


def open_manager(
    config: RunConfig, run: RunFolder, *, attempt: int, world: World, voices: Voices
) -> CheckpointManager:
    """Keeps the checkpoints of one attempt, as this rank of it."""
    checkpoint = config.checkpoint
    return CheckpointManager(
        run.checkpoints,
        # Not the folder's name: a folder may be renamed, or copied.
        run=str(run.record().get("run", run.id)),
        rank=world.rank,
        world=world.size,
        node=world.node,
        attempt=attempt,
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every,
        ranks_per_node=world.local_size,
        keep_best=checkpoint.keep_best,
        fence=lambda: run.check_attempt(attempt),
        deadline_s=config.launch.hang_timeout,
        tiers=[t.model_copy(update={"every": t.every or checkpoint.every}) for t in checkpoint.tiers],
        asynchronous=checkpoint.async_,
        when_busy=checkpoint.when_busy,
        max_failures=checkpoint.max_failures,
        retry_s=checkpoint.retry,
        run_folder=run,
        log=run.logs(attempt) / f"writer-{world.rank:05d}.log",
        token=str(run.record().get("token", "")),
        agree=voices.rows,
    )


def read_newest(
    state: TrainState,
    manager: CheckpointManager,
    *,
    config: RunConfig,
    run: RunFolder,
    world: World,
    voices: Voices,
) -> tuple[Snapshot, Restored] | None:
    """Fills the state from the newest step that all tiers together hold; None when there is none."""
    tiers = config.checkpoint.tiers
    store = next((tier for tier in tiers if tier.tier == "object"), None)
    with open_nodes(
        tiers,
        run=manager.run,
        rank=world.rank,
        world=world.size,
        local_size=world.local_size,
        node=world.node,
        attempt=manager.attempt,
        token=str(run.record().get("token", "")),
        memory=memory_folder(tiers, node=world.node),
        texts=voices.texts,
    ) as nodes:
        restorer = Restorer(
            checkpoints=run.checkpoints,
            control=run.control,
            run=manager.run,
            attempt=manager.attempt,
            rank=world.rank,
            node=world.node,
            agree=voices.first_fault,
            texts=voices.texts,
            views=nodes.views,
            objects=store
            and ObjectTier(store.url or "", store.options, manager.run, attempt=manager.attempt),
            decode=nodes.decode,
            leads=world.local_rank == 0,
        )
        load = partial(state.load, agree=voices.first_fault)
        return restorer.restore(load, distrust=manager.distrust)
