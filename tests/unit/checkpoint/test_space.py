"""Space is counted before it is needed: what is asked, what is there, and what would need less."""

from pathlib import Path

import pytest
import torch

from sirara.checkpoint import space
from sirara.checkpoint.arena import memory_root
from sirara.checkpoint.space import (
    Need,
    Room,
    Seats,
    check_before_save,
    check_before_training,
    memory_folder,
    planned_needs,
    state_bytes,
    used,
)
from sirara.comm.stand_in import StandInMail, stand_in_axes
from sirara.config.schema import TierConfig
from sirara.errors import PlanError, StorageError
from sirara.train.assemble import assemble, specs_of
from sirara.train.trace import mesh_of
from tests.layouts import small

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("freeze", [[], ["transformer.wte.weight"]], ids=["all", "frozen"])
def test_the_bytes_of_a_step_are_those_of_the_tensors_that_are_saved(precision, optimizer, freeze):
    train = {"precision": precision, "optimizer": {"name": optimizer, "lr": 1e-3}, "freeze": freeze}
    config, shape = small(train=train, mesh={"dp": 1})
    specs, mesh = specs_of(config, shape), mesh_of(config, 0)
    comms = {"plane": [0], **{axis: mesh.peers(axis) for axis in ("pp", "dp", "tp")}}
    state = assemble(
        config,
        shape,
        specs,
        mesh=mesh,
        comms=stand_in_axes(0, 1, comms),
        device=torch.device("meta"),
        mail=StandInMail,
    ).state
    saved = sum(DTYPE_BYTES[t.dtype] * torch.Size(t.shape).numel() for t in state.plan())
    assert state_bytes(config, specs) == saved


def needs_of(tmp_path, *, seats: Seats | None = None, steps: int = 100, **checkpoint) -> dict[str, Need]:
    config, shape = small(
        train={"steps": steps, "eval_every": 1}, mesh={"dp": 1}, checkpoint={"every": 10, **checkpoint}
    )
    found = planned_needs(
        config,
        specs_of(config, shape),
        checkpoints=tmp_path / "checkpoints",
        run="run-1",
        seats=seats or Seats(),
        pinned=0,
    )
    assert len({n.tier for n in found}) == len([n for n in found if n.folder != tmp_path / "nvme-3/run-1"])
    return {n.tier if n.folder != tmp_path / "nvme-3/run-1" else "nvme": n for n in found}


def test_a_plain_run_needs_the_kept_steps_and_one_more(tmp_path):
    need = needs_of(tmp_path, keep_last=3)["disk"]
    assert (need.times, need.folder) == (4, tmp_path / "checkpoints")
    assert needs_of(tmp_path, keep_last=3, keep_every=20)["disk"].times == 4 + 3  # 20, 40 and 60 lie below 70
    assert needs_of(tmp_path, keep_last=3, steps=20)["disk"].times == 2


def test_every_tier_is_counted_where_it_lies(tmp_path):
    found = needs_of(
        tmp_path,
        seats=Seats(world=8, local=2, nodes=4, node=3),
        tiers=[
            {"tier": "memory", "path": str(tmp_path / "shm-{node}")},
            {"tier": "peer", "copies": 3},
            {"tier": "parity", "data": 2, "parity": 1},
            "disk",
        ],
    )
    share = -(-found["disk"].each // 4)
    assert (found["memory"].times, found["memory"].each) == (2, share)
    assert (found["peer"].times, found["peer"].each) == (6, share)
    assert (found["parity"].times, found["parity"].each) == (3, -(-share // 2))
    assert {found[t].folder for t in ("memory", "peer", "parity")} == {tmp_path / "shm-3/run-1"}


@pytest.mark.parametrize(
    ("tiers", "wanted"),
    [
        ([{"tier": "parity", "path": "/shm/{node}"}], "/shm/3"),
        ([{"tier": "parity"}, {"tier": "peer", "path": "/shm/{node}"}], "/shm/3"),
        ([{"tier": "peer", "path": "/peer"}, {"tier": "memory", "path": "/own/{node}"}], "/own/3"),
        ([{"tier": "peer", "path": "/peer"}, {"tier": "memory"}], memory_root(None, 3)),
        ([{"tier": "disk", "path": "/nvme"}], memory_root(None, 3)),
    ],
)
def test_snapshots_lie_with_the_copies_of_the_node_unless_memory_is_named(tiers, wanted):
    assert memory_folder([TierConfig(**tier) for tier in tiers], node=3) == Path(wanted)


def test_a_disk_of_the_node_and_the_snapshots_are_counted_beside_the_shared_steps(tmp_path):
    found = needs_of(
        tmp_path, seats=Seats(node=3), tiers=[{"tier": "disk", "path": str(tmp_path / "nvme-{node}")}]
    )
    assert set(found) == {"disk", "nvme"}
    assert found["nvme"].bytes == 3 * found["disk"].each
    assert needs_of(tmp_path, tiers=["disk", "memory"])["memory"].folder.parent.parent == Path("/dev/shm")
    # A snapshot that need not outlive its process finds room where shared memory is small.
    assert set(needs_of(tmp_path, **{"async": True})) == {"disk"}


# ---- the checks


@pytest.fixture
def rooms(monkeypatch):
    """Free bytes and inodes by path prefix; each prefix is a file system of its own."""
    table: dict[str, tuple[int, int | None]] = {}

    def room_at(path: Path) -> Room | None:
        for n, (prefix, (size, inodes)) in enumerate(table.items()):
            if str(path).startswith(prefix):
                return Room(place=Path(prefix), device=n, bytes=size, inodes=inodes)
        return None

    monkeypatch.setattr(space, "room_at", room_at)
    return table


def disk(times=4, each=1000, files=10, last=3, **fields) -> Need:
    return Need(
        tier="disk",
        folder=Path("/d/run/checkpoints"),
        times=times,
        each=each,
        files=files,
        last=last,
        **fields,
    )


def memory(times=2, each=1000) -> Need:
    return Need(
        tier="memory", folder=Path("/m/run"), times=times, each=each, files=4, why="two snapshots in turn"
    )


def test_a_plan_that_fits_passes_and_one_byte_less_does_not(rooms):
    rooms["/d"] = (4200, None)
    check_before_training([disk()])
    rooms["/d"] = (4199, None)
    with pytest.raises(PlanError, match="no space left for checkpoints \\(disk\\) at /d") as caught:
        check_before_training([disk(why="keep_last 3, one being written")])
    assert caught.value.code == "SR260" and caught.value.exit_code == 3
    assert "4200 bytes asked, 4199 bytes free, 1 missing" in caught.value.why
    assert "disk: 4 x 1000 bytes (keep_last 3, one being written)" in caught.value.why
    assert "checkpoint.keep_last=2" in caught.value.try_


def test_tiers_on_one_file_system_are_added_up(rooms):
    rooms["/"] = (6299, None)
    with pytest.raises(PlanError, match=r"\(disk and memory\)") as caught:
        check_before_training([disk(), memory()])
    assert "6300 bytes asked" in caught.value.why
    rooms.clear()
    rooms |= {"/d": (4200, None), "/m": (2100, None)}
    check_before_training([disk(), memory()])
    rooms["/m"] = (2099, None)
    with pytest.raises(PlanError, match=r"\(memory\) at /m"):
        check_before_training([disk(), memory()])


def test_inodes_are_counted_where_the_file_system_counts_them(rooms):
    rooms["/d"] = (1 << 40, 39)
    with pytest.raises(PlanError, match="no inodes left") as caught:
        check_before_training([disk()])
    assert "40 files asked, 39 inodes free" in caught.value.why
    with pytest.raises(StorageError, match="no inodes left"):
        check_before_save([disk(times=4)])
    rooms["/d"] = (1 << 40, None)
    check_before_training([disk()])


def test_what_lies_there_already_counts_as_room_but_one_more_step_must_fit(tmp_path, rooms):
    step = Need(tier="disk", folder=tmp_path, times=4, each=1 << 20, files=1, last=3)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "model").write_bytes(b"x" * (3 << 20))
    assert used(tmp_path) == (3 << 20, 1)
    rooms[str(tmp_path)] = (int(1.05 * (1 << 20)), 100)
    check_before_training([step])
    (tmp_path / "step-1" / "more").write_bytes(b"x" * (3 << 20))
    check_before_training([step])
    rooms[str(tmp_path)] = (1 << 20, 100)
    with pytest.raises(PlanError, match="no space left"):
        check_before_training([step])


def test_a_save_that_cannot_fit_is_refused_as_a_failed_save(rooms):
    rooms["/d"] = (1000, 10)
    check_before_save([disk(times=1)])
    rooms["/d"] = (999, 10)
    with pytest.raises(StorageError, match="no space left for checkpoints") as caught:
        check_before_save([disk(times=1)])
    assert caught.value.code == "SR601" and "1000 bytes asked, 999 bytes free, 1 missing" in caught.value.why


def test_what_is_missing_is_never_said_to_be_nothing(rooms):
    rooms["/d"] = (999_000, 10)
    with pytest.raises(StorageError) as caught:
        check_before_save([disk(times=1, each=1_000_000)])
    assert "free 0.1 MiB there" in caught.value.try_
    with pytest.raises(StorageError) as caught:
        check_before_save([disk(times=1, each=3 << 30)])
    assert "free 3.0 GiB there" in caught.value.try_


def test_a_file_system_that_says_nothing_is_not_an_obstacle(rooms):
    check_before_training([disk()])


def test_the_real_file_system_is_asked_through_a_folder_that_is_not_there_yet(tmp_path):
    room = space.room_at(tmp_path / "a" / "b")
    assert room is not None and room.place == tmp_path and room.bytes > 0
    assert room.device == tmp_path.stat().st_dev
