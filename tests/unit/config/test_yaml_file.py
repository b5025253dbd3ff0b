"""YAML without traps and with lines."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.config.yaml_file import dump_yaml, parse_yaml, read_yaml
from sirara.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("0", 0),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        # In YAML 1.1 these are False, True, 8, 5400 and a date.
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'3e-4'", "3e-4"),
        ("e5", "e5"),
        ("1e", "1e"),
    ],
)
def test_scalar_is_what_it_looks_like(text, value):
    found = parse_yaml(f"key: {text}", "x")[0]["key"]
    assert found == value
    assert type(found) is type(value)


def test_infinite_and_nan_are_numbers_that_the_schema_can_refuse():
    found = parse_yaml("[.inf, -.inf, .nan]", "x")[0]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_every_key_and_item_has_its_line():
    _, lines = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "x")
    assert lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5,
    }


def test_key_given_twice_is_refused_with_both_lines():
    with pytest.raises(ConfigError) as caught:
        parse_yaml("train:\n  steps: 1\n  lr: 2\n  steps: 3\n", "run.yaml")
    assert caught.value.what == "train.steps is given twice"
    assert caught.value.where == "run.yaml:2 and run.yaml:4"


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "\ta: 1",
        "a: 1\n---\nb: 2",
        "a: !!python/object/apply:os.system [id]",
        "a: !mine 1",
        "a: !!int many",
        "a: &x [*x]",
        "a: *nowhere",
        "{a: 1}: 2",
        "a: \x01",
        "a: " + "[" * 5000,
        "a: " + "9" * 5000,
    ],
)
def test_what_is_no_plain_mapping_is_refused_by_file_and_never_run(text):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    assert "run.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n", "holds a list"),
        (b"word", "holds a single value"),
        (b"a: \xff", "byte 0xff at offset 3"),
    ],
)
def test_file_that_is_no_mapping_is_refused_by_what_it_is(tmp_path, content, said):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_yaml(path)


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), _plain, max_size=6))
def test_what_is_dumped_is_read_back(value):
    assert parse_yaml(dump_yaml(value), "x")[0] == value
