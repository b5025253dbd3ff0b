"""Profiles: written and read alike, refused when damaged or of another machine, interpolated between measurements."""

from dataclasses import replace
from math import sqrt

import pytest

from sirara.config.schema import RunConfig
from sirara.errors import ConfigError
from sirara.plan.calibrated import Measured, merged, profile_of
from sirara.plan.hardware import find, load
from sirara.plan.profile import (
    Machine,
    Move,
    Profile,
    Rate,
    UnitTime,
    default_path,
    here,
    interpolated,
    of_profile,
    read,
    text_of,
    this_machine,
    understood,
)
from sirara.plan.setting import setting_here
from sirara.pure.shape import ModelShape


def unit(name: str, *, forward: float = 0.01, backward: float = 0.02, **changed: object) -> UnitTime:
    row = UnitTime(
        signature="llama", unit=name, micro_batch=1, seq_len=128, tp=1, sequence=False, dtype="fp32", threads=1,
        processes=1, recompute="none", forward_s=forward, light_s=forward, backward_s=backward,
        input_s=backward / 2, weight_s=backward / 2,
    )  # fmt: skip
    return replace(row, **changed)  # pyright: ignore[reportArgumentType]


def profile(machine: Machine | None = None, **changed: object) -> Profile:
    machine = replace(machine or this_machine("cpu"), date="2026-11-30T12:00:00")
    found = Profile(
        machine=machine,
        accelerator=replace(find("cpu"), hbm_bytes_per_s=1.25e10, achievable=0.5),
        units=(unit("embed"), unit("block"), unit("head")),
        moves=(
            Move(kind="exchange", ranks=2, across=False, bytes=1000, seconds=1e-3),
            Move(kind="exchange", ranks=2, across=False, bytes=100_000, seconds=1e-2),
        ),
        rates=(Rate(kind="add", processes=1, per_s=4e9), Rate(kind="add", processes=2, per_s=3e9)),
        crowd={1: 1.0, 2: 1.2},
        disk_write_per_s=1e9,
        disk_read_per_s=None,
    )
    return replace(found, **changed)  # pyright: ignore[reportArgumentType]


def test_a_profile_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "profile.yaml"
    file.write_text(text_of(profile()))
    assert read(file) == profile()
    assert load(file).hbm_bytes_per_s == 1.25e10


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t[: len(t) // 2], ""),
        (lambda t: t.replace("sirara_profile: 2", "sirara_profile: 1"), "format is 1"),
        (lambda t: t.replace("forward_s: 0.01", "forward_s: -0.01", 1), "no positive number"),
        (lambda t: t.replace("forward_s", "forwards", 1), "forwards"),
        (lambda t: "cpu: {}", "no key sirara_profile"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_reason_and_plans_go_on_without_it(tmp_path, change, why):
    file = tmp_path / "profile.yaml"
    file.write_text(change(text_of(profile())))
    with pytest.raises(ConfigError, match="no profile that can be used") as refused:
        read(file)
    assert refused.value.code == "SR218" and why in refused.value.why
    found = here("cpu", env={"SIRARA_PROFILE": str(file)})
    assert found.how == "shipped" and found.refused and "damaged" in found.why


def test_a_profile_of_another_machine_is_refused_and_says_what_differs(tmp_path):
    file = tmp_path / "profile.yaml"
    file.write_text(text_of(profile(replace(this_machine("cpu"), cores=977))))
    found = here("cpu", env={"SIRARA_PROFILE": str(file)})
    assert found.how == "shipped" and found.refused
    assert "of another machine" in found.why and "cores 977" in found.why
    assert found.accelerator.hbm_bytes_per_s == find("cpu").hbm_bytes_per_s


def test_a_profile_of_this_machine_wins_over_the_shipped_table_and_ranks_share_its_memory(tmp_path):
    file = tmp_path / "profile.yaml"
    file.write_text(text_of(profile()))
    setting, found = setting_here("cpu", workers=4, env={"SIRARA_PROFILE": str(file)})
    assert found.how == "profile" and "2026-11-30" in found.why
    assert setting.profile == profile()
    assert setting.table.hbm_bytes_per_s[0] == pytest.approx(1.25e10 * find("cpu").hbm_achievable)
    assert setting.capacity_bytes == pytest.approx(this_machine("cpu").memory_bytes / 4)


def test_without_a_profile_the_shipped_table_stands_and_nothing_is_refused(tmp_path):
    for env in ({"SIRARA_PROFILE": "none"}, {"XDG_CONFIG_HOME": str(tmp_path)}):
        found = here("cpu", env=env)
        assert found.how == "shipped" and not found.refused and found.profile is None
    assert default_path({"XDG_CONFIG_HOME": "/c"}).parts[-3:] == ("c", "sirara", "profile.yaml")


def test_moves_are_interpolated_on_logarithmic_axes_and_grow_with_bytes_beyond_them():
    p = profile()
    assert p.move_s("exchange", ranks=2, nbytes=10_000) == pytest.approx(sqrt(1e-3 * 1e-2))
    assert p.move_s("exchange", ranks=2, nbytes=1) == 1e-3
    assert p.move_s("exchange", ranks=2, nbytes=1_000_000) == pytest.approx(0.1)
    assert p.move_s("exchange", ranks=1, nbytes=1_000_000) == 0.0
    assert p.move_s("letter", ranks=2, nbytes=10) is None
    assert interpolated([(1.0, 2.0)], 3.0) == 6.0


def test_crowding_is_straight_in_the_logarithm_and_beyond_the_cores_work_adds_up():
    p = profile()
    assert p.crowd_s(1) == 1.0 and p.crowd_s(2) == 1.2
    assert 1.0 < p.crowd_s(1.5) < 1.2
    assert p.crowd_s(8) == pytest.approx(1.2 * 4)
    assert p.rate("add", processes=2) == 3e9 and p.rate("copy", processes=2) is None


def test_a_second_calibration_adds_and_replaces_what_it_measured_again():
    old = profile()
    again = unit("block", forward=9.0)
    lion = Rate(kind="update lion fp32", processes=1, per_s=1.0)
    new = profile(units=(again,), moves=(), rates=(lion,), crowd={1: 1.0})
    found = merged(old, new)
    assert [u for u in found.units if u.unit == "block"] == [again]
    assert {u.unit for u in found.units} == {"embed", "block", "head"}
    assert found.moves == old.moves and set(found.rates) == {*old.rates, lion}
    assert found.crowd == {1: 1.0, 2: 1.2}


def test_what_calibration_writes_is_what_plans_read_even_when_times_contradict_each_other(tmp_path):
    # A block ten times as slow, and ten times as fast, as its products would have it.
    c, shape = small()
    for block_s, product in ((10.0, 1e12), (1e-6, 1e6)):
        found = profile_of(
            replace(this_machine("cpu"), date="2026-11-30"),
            find("cpu"),
            Measured(
                units=(unit("block", forward=block_s, backward=block_s),),
                moves=(),
                rates=(
                    Rate(kind="product fp32", processes=1, per_s=product),
                    Rate(kind="attention fp32", processes=1, per_s=1e15),
                ),
                bandwidth={},
                doubts="one round of measurements",
            ),
            c,
            shape,
        )
        assert understood(text_of(found), tmp_path / "p.yaml") == found
        assert "in doubt: one round" in of_profile(found).why


def small():
    tree = {
        "schema": 1, "name": "x",
        "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "max_seq": 128},
        "data": {"train": [{"path": "none"}], "seq_len": 128},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 1, "precision": "fp32",
                  "optimizer": {"name": "adamw", "lr": 1e-3}},
    }  # fmt: skip
    shape = ModelShape(family="llama", layers=4, hidden=64, heads=4, vocab=256, max_seq=128)
    return RunConfig.model_validate(tree), shape
