"""A keeper's uploads: each committed step that is due goes to the object store while the next saves go on. No torch.

step folder, committed ─► each rank its share of the files ─► rank 0: commit there ─► retention there
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sirara.checkpoint.commit import wait_for_commit
from sirara.checkpoint.job import KeeperSettings, SaveJob, TierResult, UploadEnd
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.steps import step_name
from sirara.checkpoint.storage import read_file
from sirara.errors import CommTimeout, SiraraError
from sirara.pure.manifest import MANIFEST

_log = logging.getLogger("sirara")


class Uploads:
    """One upload after the other, in the same order on all ranks, in a thread of its own.

    Args:  fence: asked before a commit.  ended: told, from that thread, how an upload ended.
    Attributes:  under_way: the steps that are being read, or will be.
    """

    def __init__(
        self,
        store: ObjectTier,
        settings: KeeperSettings,
        *,
        total_bytes: int,
        fence: Callable[[], None] | None,
        ended: Callable[[UploadEnd], None],
    ) -> None:
        self._store, self._settings, self._total_bytes = store, settings, total_bytes
        self._fence, self._ended = fence, ended
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._is_clean = False
        self.under_way: set[int] = set()

    def begin(self, job: SaveJob) -> None:
        self.under_way.add(job.step)
        self._thread.submit(self._upload, job)

    def close(self) -> None:
        """Waits for what was begun."""
        self._thread.shutdown()

    def _upload(self, job: SaveJob) -> None:
        result = TierResult(ok=False, fault="the upload ended with an error that is in the log of the writer")
        try:
            result = self._keep(job)
        except Exception:  # noqa: BLE001  this thread has nobody above it
            _log.exception("the upload of step %d failed", job.step)
        self.under_way.discard(job.step)
        self._ended(UploadEnd(step=job.step, uuid=job.uuid, result=result))

    def _keep(self, job: SaveJob) -> TierResult:
        began, s, store = time.perf_counter(), self._settings, self._store
        try:
            if s.rank == 0 and not self._is_clean:
                cleaned = store.clean()
                self._is_clean = True
                for note in cleaned.notes:
                    _log.info("%s", note)
            checkpoints = Path(s.folder)
            manifest = wait_for_commit(
                checkpoints, run=s.run, step=job.step, uuid=job.uuid, wait_s=job.deadline_s
            )
            if manifest is None:
                raise CommTimeout(f"step {job.step} was not committed on the disk, so it is not uploaded")
            folder = checkpoints / step_name(job.step)
            store.upload_part(folder, manifest, s.rank, s.world)
            if s.rank == 0:
                raw = read_file(folder / MANIFEST)
                store.commit(raw, world=s.world, deadline_s=job.deadline_s, fence=self._fence)
                store.retain(newest=job.step, keep_last=s.keep_last, keep_every=s.keep_every)
        except SiraraError as fault:
            _log.warning("step %d is not in the object store: %s", job.step, fault)
            why = fault.what + (f" ({fault.why})" if fault.why else "")
            return TierResult(ok=False, fault=why, seconds=time.perf_counter() - began)
        return TierResult(ok=True, bytes=self._total_bytes, seconds=time.perf_counter() - began)
