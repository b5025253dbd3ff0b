"""Workers and threads of one node."""

import pytest

from sirara.config.schema import LaunchConfig, MeshConfig
from sirara.errors import LayoutError
from sirara.launch import local
from sirara.launch.local import count_cores, count_gpus, plan_workers


def plan(launch=None, mesh=None, kept=None, env=None, cores=8, gpus=0):
    return plan_workers(
        LaunchConfig(**(launch or {})),
        MeshConfig(**(mesh or {})),
        kept_threads=kept,
        env=env or {},
        cores=cores,
        gpus=gpus,
    )


@pytest.mark.parametrize(
    ("launch", "mesh", "gpus", "nproc"),
    [
        ({}, {}, 0, 1),
        ({}, {}, 4, 4),
        ({}, {"dp": 2}, 0, 2),
        ({}, {"dp": 2}, 8, 2),
        ({}, {"tp": 2}, 0, 2),
        ({}, {"tp": 2}, 5, 4),
        ({}, {"tp": 2, "dp": 3}, 0, 6),
        ({"nproc": 3}, {}, 0, 3),
        ({"nproc": 4}, {"tp": 2}, 0, 4),
        ({"nproc": 4}, {"dp": 2, "pp": 2}, 0, 4),
    ],
)
def test_number_of_workers(launch, mesh, gpus, nproc):
    assert plan(launch, mesh, gpus=gpus).nproc == nproc


@pytest.mark.parametrize(
    ("nproc", "mesh", "advice"), [(3, {"dp": 2}, "launch.nproc=2"), (3, {"tp": 2}, "launch.nproc=2")]
)
def test_a_number_that_contradicts_the_mesh_is_refused_with_the_right_one(nproc, mesh, advice):
    with pytest.raises(LayoutError, match=r"launch\.nproc=3 does not fit the mesh") as caught:
        plan({"nproc": nproc}, mesh)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("launch", "kept", "env", "threads"),
    [
        ({"nproc": 2}, None, {}, 4),
        ({"nproc": 3}, None, {}, 2),
        ({"nproc": 16}, None, {}, 1),
        ({"nproc": 2, "threads": 3}, 1, {"OMP_NUM_THREADS": "2"}, 3),
        ({"nproc": 2}, 1, {"OMP_NUM_THREADS": "2"}, 1),
        ({"nproc": 2}, None, {"OMP_NUM_THREADS": "2"}, 2),
        ({"nproc": 2}, None, {"OMP_NUM_THREADS": "2,4"}, 2),
        ({"nproc": 2}, None, {"OMP_NUM_THREADS": "many"}, 4),
    ],
)
def test_number_of_threads(launch, kept, env, threads):
    assert plan(launch, kept=kept, env=env).threads == threads


def test_threads_kept_from_the_run_are_noted_when_cores_stay_idle():
    assert "2 x 1 threads on 8 cores are not all" in plan({"nproc": 2}, kept=1).note
    assert "4 x 8 threads on 8 cores are more than there are" in plan({"nproc": 4}, kept=8).note
    assert plan({"nproc": 2}, kept=4).note == ""
    assert plan({"nproc": 2, "threads": 1}, kept=4).note == ""


def test_threads_do_not_spin_where_there_are_more_than_cores():
    assert plan({"nproc": 4}, kept=2).environment() == {"OMP_NUM_THREADS": "2"}
    assert plan({"nproc": 4}, kept=3).environment() == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SIRARA_DEVICE": "cpu"}, 0),
    ],
)
def test_visible_gpus(env, gpus):
    assert count_gpus(env) == gpus


def test_a_container_quota_caps_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda pid: set(range(64)))
    for text, cores in (("250000 100000", 2), ("50000 100000", 1), ("max 100000", 64)):
        quota = tmp_path / "cpu.max"
        quota.write_text(text)
        monkeypatch.setattr(local, "CPU_QUOTA", quota)
        assert count_cores() == cores
