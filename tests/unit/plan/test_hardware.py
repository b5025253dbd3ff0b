"""Accelerators as data: every shipped one is complete, a user's own may lean on a shipped one, mistakes are named."""

import numpy as np
import pytest

from sirara.errors import ConfigError
from sirara.plan.constants import fitted
from sirara.plan.hardware import DTYPES, Cluster, find, load, shipped, shipped_table, table

NEEDED = [
    "v100-32gb", "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "b200", "gb200", "b300", "mi250x", "mi300x",
    "mi355x", "tpu-v5p", "trainium2", "gaudi3", "cpu",
]  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_shipped_accelerator_has_peaks_memory_links_and_named_sources(name):
    a = shipped()[name]
    assert a.peak("bf16") > 0 and 0 < a.achievable <= 1 and 0 < a.attention_plain <= a.attention_tuned
    assert a.hbm_bytes > 0 and a.hbm_bytes_per_s > 0 and a.up_bus_bytes_per_s <= a.up_bytes_per_s
    assert a.units > 0 and a.domain > 0 and a.host_bytes_per_s > 0 and a.sources


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("A100", "a100-80gb"),
        ("A100-40GB (DGX A100)", "a100-40gb"),
        ("V100-32GB (DGX-2)", "v100-32gb"),
        ("H100-SXM-80GB", "h100-sxm"),
        ("h100-sxm-80gb hbm3", "h100-sxm"),
        ("GB300", "gb300"),
    ],
)
def test_accelerator_is_found_by_any_of_its_names(written, found):
    assert find(written).name == found


@pytest.mark.parametrize(("more", "kin"), [("out: 12.5", "a100-80gb"), ("achievable: 0.5", "mine")])
def test_what_was_fitted_to_an_accelerator_is_right_for_one_like_it_unless_its_rate_is_known(
    tmp_path, more, kin
):
    file = tmp_path / "mine.yaml"
    file.write_text(f"mine: {{like: a100-80gb, {more}}}\n")
    found = table([find("a100-80gb"), load(file)])
    assert found.kin == ("a100-80gb", kin)
    factors = fitted().factors(found.kin)
    assert factors[0, 0] != 1.0
    assert (factors[1] == (factors[0] if kin != "mine" else 1.0)).all()


def test_one_like_another_has_its_links_from_its_own_rate_and_is_found_by_an_alias(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {like: H100-SXM-80GB, up: 20}\n")
    found = load(file)
    assert found.kin == "h100-sxm" and found.up_bus_bytes_per_s == 0.8 * 20e9
    file.write_text("mine: {like: cpu, hbm: 8}\n")
    assert load(file).on_cpu and not find("h100-sxm").on_cpu


def test_unknown_accelerator_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="h1000") as error:
        find("h1000")
    assert error.value.code == "SR210" and "h100-sxm" in error.value.try_[0]


def test_users_accelerator_takes_what_it_does_not_say_from_the_one_it_is_like(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("mine:\n  like: h100-sxm\n  out: 12.5\n  achievable: 0.5\n  sources: measured here\n")
    a = load(file)
    assert (a.name, a.out_bytes_per_s, a.achievable) == ("mine", 12.5e9, 0.5)
    assert a.peak("bf16") == find("h100-sxm").peak("bf16") and a.sources == "measured here"
    assert Cluster(accelerator=a, per_node=8, nodes=4).gpus == 32


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine:\n  like: h100-sxm\n  colour: red\n", "colour"),
        ("mine:\n  like: h9\n", "h9"),
        ("mine:\n  like: [a]\n", "not the name of one"),
        ("mine: {like: h100-sxm, names: 5}\n", "a list of names"),
        ("mine:\n  hbm: 80\n", "achievable"),
        ("a:\n  like: h100-sxm\nb:\n  like: h100-sxm\n", "2 accelerators"),
        ("[]", "table"),
        ("mine: [", "no YAML"),
        ("mine: fast\n", "keys and values"),
        ("mine: {like: h100-sxm, hbm: lots}\n", "hbm is 'lots'"),
        ("mine: {like: h100-sxm, hbm: -80}\n", "more than 0"),
        ("mine: {like: h100-sxm, hbm: .nan}\n", "not a number"),
        ("mine: {like: h100-sxm, achievable: 80}\n", "a share"),
        ("mine: {like: h100-sxm, domain: 0}\n", "domain is 0"),
        ("mine: {like: h100-sxm, peak: 989}\n", "by dtype"),
        ("mine: {like: h100-sxm, peak: {bf17: 989}}\n", "by dtype"),
        ("mine: {like: h100-sxm, attention: 0.5}\n", "two shares"),
    ],
)
def test_mistake_in_a_users_accelerator_is_named(tmp_path, text, says):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        load(file)
    assert error.value.code == "SR211"


def test_dtype_without_units_of_its_own_runs_at_the_next_wider_ones_rate():
    a100 = find("a100-80gb")
    assert a100.peak("fp8") == a100.peak("bf16") == 312e12
    assert find("h100-sxm").peak("fp4") == find("h100-sxm").peak("fp8")


def test_table_has_a_row_per_accelerator_in_order():
    t = shipped_table()
    assert t.names == tuple(shipped()) and t.peak.shape == (len(t.names), len(DTYPES))
    assert np.isnan(t.peak[t.names.index("tpu-v5p"), DTYPES.index("fp64")])
