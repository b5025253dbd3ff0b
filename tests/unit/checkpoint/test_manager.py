import json
import logging
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.checkpoint.in_line import State
from sirara.checkpoint.manager import CheckpointManager
from sirara.checkpoint.steps import committed_steps, incomplete_steps, save_uuid, step_name
from sirara.config.schema import TierConfig
from sirara.errors import (
    CheckpointError,
    CommTimeout,
    ConfigError,
    InvariantError,
    RunBusyError,
    StorageError,
)
from sirara.pure.layout import Box
from tests.checkpoints import (
    differing,
    even,
    flat_cuts,
    flip_bit,
    in_ranks,
    load,
    manager,
    plan_of,
    ranges_of,
    replicated,
    restore,
    save,
    small_state,
)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), max_size=4), st.lists(st.floats(0, 1), max_size=5))
def test_any_cut_of_the_state_over_ranks_reads_what_any_other_saved(tmp_path_factory, saved, wanted):
    state = small_state()
    folder = tmp_path_factory.mktemp("run")
    save(folder, 5, state, flat_cuts(state, saved))
    snapshot = manager(folder).open(5)
    assert differing(state, load(snapshot, state, flat_cuts(state, wanted))) == []


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_replicas_are_saved_once_and_read_by_every_layout(tmp_path, world):
    state = small_state(1)
    path = save(tmp_path, 5, state, replicated(state, world))
    stored = sum((path / f).stat().st_size for f in ("model.safetensors", "optim-0-0.safetensors"))
    assert stored == sum(t.numel() * t.element_size() for t in state.values()) + 2 * 4096
    for boxes in (even(state, 1), even(state, 4), replicated(state, 2)):
        assert differing(state, load(manager(tmp_path).open(5), state, boxes)) == []


def test_shards_that_are_strided_in_the_file_are_saved_and_read(tmp_path):
    state = {"w": torch.arange(60.0).reshape(6, 10), "w/m": torch.arange(60.0).reshape(6, 10)}
    halves = {name: {r: (Box((0, 5 * r), (6, 5)),) for r in range(2)} for name in state}
    save(tmp_path, 1, state, halves)
    for boxes in (halves, even(state, 3)):
        assert differing(state, load(manager(tmp_path).open(1), state, boxes)) == []


def test_node_folders_share_the_step_and_have_files_of_their_own(tmp_path):
    state = small_state()
    plan = plan_of(state, even(state, 4))

    def one(rank):
        m = manager(tmp_path, rank=rank, world=4, node=rank // 2, ranks_per_node=2)
        return m.save(
            3, plan=plan, ranges=ranges_of(state, even(state, 4), rank), record={}, hf_files={}, aliases={}
        )

    path = in_ranks(4, one)[0]
    assert {p.name for p in path.glob("optim-*")} == {"optim-0-0.safetensors", "optim-1-0.safetensors"}
    assert differing(state, load(manager(tmp_path).open(3), state)) == []
    with pytest.raises(ConfigError, match="rank 2 cannot be on node 1 with 4 ranks per node"):
        manager(tmp_path, rank=2, world=4, node=1)


def test_the_record_and_the_names_of_tied_tensors_come_back(tmp_path):
    state = small_state()
    m = manager(tmp_path)
    record = {"step": 9, "tokens": 7, "lr": 0.1 + 0.2, "layout": {"dp": 1}, "data": {"cursors": [2**60]}}
    m.save(
        9,
        plan=plan_of(state, even(state, 1)),
        ranges=ranges_of(state, even(state, 1), 0),
        record=record,
        hf_files={"config.json": b"{}"},
        aliases={"lm_head.weight": "embed.weight"},
    )
    snapshot = m.open(9)
    assert snapshot.record == record
    assert snapshot.manifest.tokens == 7 and snapshot.manifest.layout == {"dp": 1}
    assert torch.equal(snapshot.read("lm_head.weight"), state["embed.weight"])


# ---- what is committed


def test_steps_are_ordered_by_number_and_only_committed_ones_count(tmp_path):
    state = small_state()
    for step in (999_999_999, 1_000_000_000, 20, 3):
        save(tmp_path, step, state, keep_last=9)
    (tmp_path / step_name(2_000_000_000)).mkdir()
    (tmp_path / f".{step_name(77)}.tmp-{save_uuid('run-1', 9, 77, 0)}").mkdir()
    (tmp_path / "step-notes").mkdir()
    m = manager(tmp_path, rank=1, world=2)
    assert m.newest() == [1_000_000_000, 999_999_999, 20, 3]
    assert incomplete_steps(tmp_path) == [
        f".step-000000077.tmp-{save_uuid('run-1', 9, 77, 0)}",
        "step-2000000000",
    ]


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_run(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot use .*checkpoints"):
        committed_steps(tmp_path / "checkpoints")
    assert committed_steps(tmp_path / "not-yet") == []


def test_saving_the_same_state_again_keeps_the_committed_folder(tmp_path):
    state = small_state()
    first = save(tmp_path, 5, state)
    inode = (first / "model.safetensors").stat().st_ino
    assert save(tmp_path, 5, state) == first
    assert (first / "model.safetensors").stat().st_ino == inode


def test_another_state_of_a_step_replaces_the_folder_and_never_its_files(tmp_path):
    old, new = small_state(1), small_state(2)
    path = save(tmp_path, 5, old, record={"digest": 1})
    kept = path / "model.safetensors"
    with kept.open("rb") as opened:
        before = opened.read()
        assert save(tmp_path, 5, new, record={"digest": 2}) == path
        opened.seek(0)
        assert opened.read() == before
    assert differing(new, load(manager(tmp_path).open(5), new)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_a_damaged_step_is_replaced_when_the_run_reaches_it_again(tmp_path):
    state = small_state()
    path = save(tmp_path, 5, state)
    (path / "optim-0-0.safetensors").unlink()
    save(tmp_path, 5, state)
    assert differing(state, load(manager(tmp_path).open(5), state)) == []


# ---- commits that must not happen


def test_an_attempt_that_no_longer_owns_the_run_commits_nothing(tmp_path):
    def fence():
        raise RunBusyError("attempt 2 owns the run")

    state = small_state()
    save(tmp_path, 5, state)
    with pytest.raises(RunBusyError):
        save(tmp_path, 6, state, fence=fence)
    assert [p.name for p in tmp_path.iterdir()] == [step_name(5)]


def test_the_committer_names_the_ranks_that_did_not_report(tmp_path):
    state = small_state()
    boxes = even(state, 4)
    save(tmp_path, 4, state)

    def one(rank):
        if rank in (1, 3):
            return None
        m = manager(tmp_path, rank=rank, world=4, deadline_s=0.2)
        return m.save(
            5,
            plan=plan_of(state, boxes),
            ranges=ranges_of(state, boxes, rank),
            record={},
            hf_files={},
            aliases={},
        )

    with pytest.raises(CommTimeout, match="step 5 lacks 2 of 4 ranks: 1, 3") as caught:
        in_ranks(4, one)
    assert "no report within 0.2 s" in str(caught.value)
    assert manager(tmp_path).newest() == [4] and incomplete_steps(tmp_path) == []


def test_a_rank_that_fails_ends_the_save_at_once_with_its_own_words(tmp_path):
    state = small_state()
    boxes = even(state, 2)

    def one(rank):
        m = manager(tmp_path, rank=rank, world=2, deadline_s=60)
        ranges = ranges_of(state, boxes, rank)[: None if rank == 0 else 2]
        return m.save(5, plan=plan_of(state, boxes), ranges=ranges, record={}, hf_files={}, aliases={})

    with pytest.raises(StorageError, match="rank 1 could not write its part of step 5") as caught:
        in_ranks(2, one)
    assert "it gave no range that holds it" in str(caught.value)
    assert manager(tmp_path).newest() == []


def test_ranks_with_different_plans_do_not_commit(tmp_path):
    state = small_state()
    plans = [even(state, 2), flat_cuts(state, [0.25])]

    def one(rank):
        m = manager(tmp_path, rank=rank, world=2)
        boxes = plans[rank]
        return m.save(
            5,
            plan=plan_of(state, boxes),
            ranges=ranges_of(state, boxes, rank),
            record={},
            hf_files={},
            aliases={},
        )

    with pytest.raises(InvariantError, match="rank 1 saved by another plan than rank 0"):
        in_ranks(2, one)
    assert manager(tmp_path).newest() == []


def test_a_range_that_is_not_in_the_plan_is_refused_before_anything_is_written(tmp_path):
    state = small_state()
    boxes = even(state, 1)
    ranges = ranges_of({**state, "embed.weight": state["embed.weight"].double()}, boxes, 0)
    with pytest.raises(InvariantError, match=r"embed.weight as \('F64', \(13, 8\)\), the plan has \('F32'"):
        manager(tmp_path).save(
            5, plan=plan_of(state, boxes), ranges=ranges, record={}, hf_files={}, aliases={}
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "a/b", ".hidden"])
def test_a_small_file_cannot_take_the_place_of_another(tmp_path, name):
    with pytest.raises(InvariantError, match="cannot be the name"):
        save(tmp_path, 5, small_state(), hf_files={name: b"x"})
    assert list(tmp_path.iterdir()) == []


# ---- leftovers


def leave(folder, attempt, step=7, kind="tmp"):
    path = folder / f".{step_name(step)}.{kind}-{save_uuid('run-1', attempt, step, 0)}"
    path.mkdir(parents=True)
    (path / "report-0.json").write_text("stale")
    return path


def test_a_start_clears_what_older_attempts_left_and_nothing_of_newer_ones(tmp_path):
    old, own, newer = (leave(tmp_path, attempt) for attempt in (2, 3, 4))
    deleted = leave(tmp_path, 9, step=1, kind="gone")
    manager(tmp_path, attempt=3, rank=1, world=2)
    assert old.exists()  # only rank 0 clears
    manager(tmp_path, attempt=3)
    assert not old.exists() and not deleted.exists()
    assert own.exists() and newer.exists()


def test_a_replacement_that_was_interrupted_between_its_renames_is_undone(tmp_path):
    path = save(tmp_path, 5, small_state())
    path.rename(tmp_path / f".{path.name}.old-{save_uuid('run-1', 1, 5, 1)}")
    m = manager(tmp_path, attempt=2)
    assert m.newest() == [5]
    assert differing(small_state(), load(m.open(5), small_state())) == []


def test_stale_files_of_the_same_save_do_not_get_into_the_step(tmp_path):
    state = small_state()
    stale = tmp_path / f".{step_name(5)}.tmp-{save_uuid('run-1', 1, 5, 0)}"
    stale.mkdir()
    (stale / "optim-0-0.safetensors").write_bytes(b"\xff" * 1_000_000)
    (stale / "optim-0-1.safetensors").write_bytes(b"stale")
    boxes = even(state, 2)
    path = save(tmp_path, 5, state, boxes)
    assert differing(state, load(manager(tmp_path).open(5), state)) == []
    assert not (path / "optim-0-1.safetensors").exists()


def test_no_two_saves_share_a_name():
    uuids = [save_uuid(r, a, s, n) for r in ("a", "b") for a in (1, 2) for s in (1, 2) for n in (0, 1)]
    assert len(set(uuids)) == 16
    assert all(u.startswith(("00000001-", "00000002-")) and u[14] == "8" for u in uuids)


# ---- what stays


def test_the_step_with_the_lowest_metric_stays_however_old_it_is(tmp_path):
    state, boxes = small_state(), even(small_state(), 1)
    m = manager(tmp_path, keep_last=2, keep_best="eval/news/loss")
    for step, score in enumerate((3.0, 1.5, 2.0, 2.5, 1.75), start=1):
        m.scores[step] = score
        m.save(
            step,
            plan=plan_of(state, boxes),
            ranges=ranges_of(state, boxes, 0),
            record={"step": step},
            hf_files={},
            aliases={},
        )
    assert m.newest() == [5, 4, 2]


# ---- when it is time


def test_tiers_that_need_other_nodes_are_not_due_on_one_and_that_is_said(tmp_path, caplog):
    tiers = [TierConfig(tier=tier, every=n) for tier, n in (("parity", 1), ("peer", 2), ("memory", 4))]
    tiers.append(TierConfig(tier="disk"))
    options = {"tiers": tiers, "memory": tmp_path / "memory", "rank": 0}
    alone = manager(tmp_path / "alone", world=2, ranks_per_node=2, **options)
    assert [alone.due_tiers(step, 4) for step in (1, 2, 4)] == [(), (), ("memory", "disk")]
    assert alone.tiers == ("memory", "disk")
    assert [r.message for r in caplog.records] == [
        "the tier parity keeps nothing while the run has one node",
        "the tier peer keeps nothing while the run has one node",
    ]
    several = manager(tmp_path / "several", world=2, ranks_per_node=1, **options)
    assert [several.due_tiers(step, 4) for step in (1, 2)] == [("parity",), ("parity", "peer")]
    assert len(caplog.records) == 2


# ---- falling back


def test_restore_takes_the_newest_step_that_reads_well_and_tells_why_not_the_newer(tmp_path, caplog):
    state = small_state()
    for step in (1, 2, 3, 4):
        save(tmp_path, step, state, keep_last=9)
    (tmp_path / step_name(4) / "optim-0-0.safetensors").unlink()
    raw = bytearray((tmp_path / step_name(3) / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / step_name(3) / "model.safetensors").write_bytes(raw)
    m = manager(tmp_path)
    got = {}
    with caplog.at_level(logging.WARNING, logger="sirara"):
        found = restore(m, lambda snapshot: got.update(load(snapshot, state)))
    assert found.step == 2 and [s for s, _ in found.skipped] == [4, 3]
    assert "optim-0-0.safetensors is missing" in found.skipped[0][1]
    assert "model.safetensors: its bytes hash to" in found.skipped[1][1]
    assert differing(state, got) == []
    assert "checkpoint of step 4 cannot be used" in caplog.text


def test_a_step_that_could_not_be_read_is_written_anew_and_counts_no_more_until_then(tmp_path):
    state, boxes = small_state(), even(small_state(), 1)
    for step in (1, 2, 3):
        path = save(tmp_path, step, state)
    flip_bit(path / "model.safetensors", 4100)
    m = manager(tmp_path, attempt=2, keep_last=2)

    def again(step):
        return m.save(
            step,
            plan=plan_of(state, boxes),
            ranges=ranges_of(state, boxes, 0),
            record={"step": step, "tokens": 100 * step},  # what the run would save again, bit for bit
            hf_files={"config.json": b"{}\n"},
            aliases={},
        )

    assert restore(m, lambda snapshot: load(snapshot, state) and None).step == 2
    assert not (path / "verified.json").exists()
    again(4)
    assert m.newest() == [4, 3, 2]  # 3 is no good, so 2 is the second one
    again(3)
    assert differing(state, load(m.open(3), state)) == []


def test_all_ranks_take_the_step_that_every_rank_can_read(tmp_path):
    state = small_state()
    for step in (1, 2):
        save(tmp_path, step, state)
    barrier, faults = threading.Barrier(2), ["", ""]

    def one(rank):
        def read(snapshot):
            if rank == 1 and snapshot.step == 2:
                raise CheckpointError("only rank 1 sees this")

        def agree(fault):
            faults[rank] = fault
            barrier.wait()
            first = next((f for f in faults if f), "")
            barrier.wait()
            return first

        return restore(manager(tmp_path, rank=rank, world=2), read, agree=agree)

    for found in in_ranks(2, one):
        assert found.step == 1 and found.skipped == ((2, "only rank 1 sees this"),)


def test_restore_of_an_empty_run_is_none_and_of_a_ruined_one_an_error(tmp_path):
    assert restore(manager(tmp_path / "new"), lambda snapshot: None) is None
    for step in (1, 2):
        (save(tmp_path, step, small_state()) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of the 2 steps that were found") as caught:
        restore(manager(tmp_path), lambda snapshot: None)
    assert "step 2: " in str(caught.value) and "step 1: " in str(caught.value)


def test_a_manager_says_how_long_its_save_took_and_how_much_it_wrote(tmp_path):
    state = small_state()
    m = manager(tmp_path)
    boxes = even(state, 1)
    path = m.save(
        5,
        plan=plan_of(state, boxes),
        ranges=ranges_of(state, boxes, 0),
        record={},
        hf_files={},
        aliases={},
    )
    assert m.times.total_bytes == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    assert m.times.write_s > 0 and m.times.verify_s > 0
    assert json.loads((path / "verified.json").read_text())["uuid"] == m.open(5).manifest.uuid
    assert isinstance(m, CheckpointManager)


def test_a_snapshot_that_cannot_be_taken_is_a_failed_save_and_no_more(tmp_path):
    state = small_state()
    boxes = even(state, 1)
    m = manager(tmp_path / "checkpoints", asynchronous=True, memory=tmp_path / "shm")
    given = State(
        plan=plan_of(state, boxes),
        ranges=ranges_of(state, boxes, 0),
        record={"step": 1, "tokens": 1},
        hf_files={},
        aliases={},
    )
    m.prepare(given.plan)
    stage = m.beside.background.stage

    def full(*args):
        raise StorageError("no room for the snapshot", code="SR601")

    m.beside.background.stage = full
    m.start(1, given, tiers=("disk",))
    (outcome,) = m.poll()
    assert (outcome.kind, outcome.in_a_row) == ("failed", 1) and "no room" in str(outcome.fault)
    m.beside.background.stage = stage
    m.start(2, given, tiers=("disk",), patient=True)
    assert m.wait().fault is None and m.newest() == [2]
    m.close(clean=True)
