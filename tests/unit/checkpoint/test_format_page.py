"""docs/checkpoint-format.md is exact: its reader is run, its claims are checked on a real step."""

import json
import re
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from tests.checkpoints import even, manager, plan_of, ranges_of, save, small_state

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def reader():
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["read_checkpoint"], code


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Saved by three ranks, with a tied name."""
    folder = tmp_path_factory.mktemp("run")
    state = small_state(3)
    path = save(folder, 12, state, even(state, 3), record={"lr": 0.1, "tokens": 9})
    return path, state


def test_the_reader_on_the_page_has_about_thirty_lines_and_needs_numpy_alone(reader):
    lines = [line for line in reader[1].splitlines() if line.strip()]
    assert len(lines) <= 34
    assert re.findall(r"^(?:import|from) (\S+)", reader[1], re.M) == ["json", "pathlib", "numpy"]


def test_the_reader_on_the_page_reads_what_was_saved(reader, step):
    path, state = step
    arrays, record = reader[0](path)
    assert record == {"lr": 0.1, "tokens": 9}
    assert arrays.keys() == state.keys()
    for name, t in state.items():
        found = torch.from_numpy(arrays[name].copy())
        assert found.shape == t.shape
        assert torch.equal(found, t.float() if t.dtype == torch.bfloat16 else t)


def test_the_reader_on_the_page_knows_tied_names(reader, tmp_path):
    state = small_state()
    path = manager(tmp_path).save(
        1,
        plan=plan_of(state, even(state, 1)),
        ranges=ranges_of(state, even(state, 1), 0),
        record={},
        hf_files={},
        aliases={"lm_head.weight": "embed.weight"},
    )
    arrays, _ = reader[0](path)
    assert (arrays["lm_head.weight"] == state["embed.weight"].numpy()).all()


def test_the_reader_on_the_page_refuses_another_version(reader, tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "sirara-checkpoint", "version": 2}')
    with pytest.raises(ValueError, match="not in format 1"):
        reader[0](tmp_path)


def test_every_byte_of_a_step_is_covered_by_a_hash_as_the_page_says(step):
    path, _ = step
    raw = (path / "manifest.json").read_bytes()
    body, last = raw[: raw.rindex(b"\n,")], raw[raw.rindex(b"\n,") + 1 :]
    assert last == f',"check":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()
    m = json.loads(raw)
    files, p = m["files"], m["pieces"]
    assert {f.name for f in path.iterdir()} - set(files["name"]) == {"manifest.json", "verified.json"}
    for i, name in enumerate(files["name"]):
        data = (path / name).read_bytes()
        assert len(data) == files["bytes"][i]
        covered = files["head"][i]
        assert xxhash.xxh3_128_hexdigest(data[:covered]) == files["hash"][32 * i : 32 * i + 32]
        for j in (j for j, f in enumerate(p["file"]) if f == i):
            assert p["position"][j] == covered
            covered += p["length"][j]
            piece = data[p["position"][j] : covered]
            assert xxhash.xxh3_128_hexdigest(piece) == p["hash"][32 * j : 32 * j + 32]
        assert covered == len(data)


def test_headers_and_names_are_as_the_page_says(step):
    path, state = step
    m = json.loads((path / "manifest.json").read_bytes())
    assert m["uuid"].startswith(f"{m['attempt']:08x}-")
    for name in ("model.safetensors", "optim-0-0.safetensors"):
        raw = (path / name).read_bytes()
        assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0
        with safe_open(path / name, "pt") as opened:
            assert opened.metadata() == {
                "format": "pt",
                "sirara.step": "000000000012",
                "sirara.uuid": m["uuid"],
            }
    with safe_open(path / "optim-0-0.safetensors", "pt") as opened:
        assert "scale/value[]" in opened.keys()  # noqa: SIM118 - not a dict
        row = opened.get_tensor("head.weight/master[2:4,0:8]")
    assert torch.equal(row, state["head.weight/master"][2:4])
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    weights = {n: t for n, t in state.items() if "/" not in n}
    assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in weights.values())
