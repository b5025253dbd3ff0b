"""`sirara ckpt verify`, `repair`, `why` over all places as a user meets them: output, exit codes, messages."""

import json
import os
import shutil
from functools import partial

import pytest
from click.testing import CliRunner

from sirara.checkpoint.generation import GenerationStore
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.parity import rebuild
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.restore import Restorer
from sirara.checkpoint.serve import LocalNode
from sirara.checkpoint.steps import committed_steps, save_uuid, step_name
from sirara.cli.main import cli
from sirara.pure.manifest import MANIFEST
from tests.checkpoints import differing, even, flip_bit, load, save, small_state
from tests.node_copies import keep_images, keep_parity

RUN = "demo-12345678"
WORLD = 4
CONFIG = """\
name: demo
model: {{family: llama, layers: 1, hidden: 32, heads: 2, ffn: 64, vocab: 61, max_seq: 32}}
data: {{train: [{{path: store}}], seq_len: 32}}
train: {{steps: 99, global_batch: 2, micro_batch: 2, optimizer: {{name: adamw, lr: 0.1}}}}
checkpoint:
  every: 1
  tiers:
    - {{tier: memory, path: "{root}/node-{{node}}"}}
    - disk
    - {{tier: object, url: "{bucket}"}}
"""


def sirara(*args):
    return CliRunner().invoke(cli, list(map(str, args)))


@pytest.fixture
def run(tmp_path):
    """Steps 8 and 10 in folders, saved by 4 ranks; 10 also as images and parity of 4 nodes and as objects."""
    path = tmp_path / "runs" / RUN
    for step in (8, 10):
        save(path / "checkpoints", step, small_state(step), even(small_state(step), WORLD), run=RUN)
    (path / "run.json").write_text(json.dumps({"format": 1, "run": RUN, "created": "2026"}))
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket"
    (path / "config.yaml").write_text(CONFIG.format(root=tmp_path / "nodes", bucket=url))
    return path


@pytest.fixture
def images(run, tmp_path):
    state = small_state(10)
    for keep in (keep_images, partial(keep_parity, m=1)):
        keep(tmp_path / "nodes", step_of(run, 10), state, even(state, WORLD))
    return tmp_path / "nodes"


@pytest.fixture
def objects(run, tmp_path):
    tier = ObjectTier(f"file://{tmp_path}/bucket", {}, RUN, attempt=1)
    step = step_of(run, 10)
    tier.upload_part(step, Snapshot(step).manifest, 0, 1)
    tier.commit((step / MANIFEST).read_bytes(), world=1, deadline_s=5.0)
    return tmp_path / "bucket"


def step_of(run, step):
    return run / "checkpoints" / step_name(step)


def events(run, *records):
    (run / "events.jsonl").write_text("".join(json.dumps({"attempt": 1, **r}) + "\n" for r in records))


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# ---- verify


def test_verify_reads_folders_images_parity_and_objects(run, images, objects):
    result = sirara("ckpt", "verify", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(": good, " in line for line in lines) == 2 + 2 * WORLD + 1
    assert any(line.startswith("memory of node 3: step 10, image of rank 3: good") for line in lines)
    shown = json.loads(sirara("ckpt", "verify", run, "--json").stdout)
    assert shown["ok"] and len(shown["steps"]) == 2 and len(shown["copies"]) == 2 * WORLD + 1
    assert shown["unasked"] == [] and shown["incomplete"] == []
    assert len(json.loads(sirara("ckpt", "verify", run, "--disk-only", "--json").stdout)["copies"]) == 0


def test_verify_names_what_is_bad_in_every_place_with_exit_65(run, images, objects):
    flip_bit(next((images / "node-1").rglob("image-1")), -1)  # the padding behind the pieces is nobody's
    flip_bit(next(objects.rglob("model.safetensors")), 4100)
    flip_bit(next(p for p in (images / "node-2").rglob("parity-*") if p.suffix != ".json"), 0)
    next((images / "node-0").rglob("rank-0.json")).write_text("{")
    result = sirara("ckpt", "verify", run, "--json")
    assert result.exit_code == 65
    shown = json.loads(result.stdout)
    bad = [c for c in shown["copies"] if c["faults"]]
    assert {(c["place"].partition(":")[0], c["what"].partition(" ")[0]) for c in bad} == {
        ("memory of node 2", "parity"), ("file", "save"),
    }  # fmt: skip
    assert any("embed.weight" in fault for c in bad for fault in c["faults"])
    assert any("rank-0.json" in line for line in shown["incomplete"])
    assert sirara("ckpt", "verify", run, "--step", 8).exit_code == 0
    assert sirara("ckpt", "verify", run, "--step", 10).exit_code == 65


def test_verify_of_a_step_that_only_other_places_have(run, images):
    shutil.rmtree(step_of(run, 10))
    result = sirara("ckpt", "verify", run, "--step", 10)
    assert result.exit_code == 0 and result.stdout.count("good, ") == 2 * WORLD
    assert sirara("ckpt", "verify", run, "--step", 11).exit_code == 2


# ---- repair


@pytest.mark.parametrize("source", ["memory", "parity", "object"])
def test_repair_takes_bad_pieces_from_the_place_that_has_them(run, tmp_path, request, source):
    before = content(step_of(run, 10))
    request.getfixturevalue("objects" if source == "object" else "images")
    if source == "parity":
        shutil.rmtree(tmp_path / "nodes" / "node-2")
    for name in ("model.safetensors", "optim-0-0.safetensors"):
        raw = bytearray((step_of(run, 10) / name).read_bytes())
        raw[4096:] = bytes(len(raw) - 4096)
        (step_of(run, 10) / name).write_bytes(raw)
    assert sirara("ckpt", "verify", run, "--disk-only").exit_code == 65
    dry = sirara("ckpt", "repair", run, "--dry-run")
    assert dry.exit_code == 0 and "can be repaired" in dry.stdout
    assert sirara("ckpt", "verify", run, "--disk-only").exit_code == 65
    result = sirara("ckpt", "repair", run, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert [s["step"] for s in shown["steps"]] == [10, 8] and shown["steps"][1]["mended"] == []
    used = {m["from"] for m in shown["steps"][0]["mended"]}
    expected = {"memory": {f"memory of node {n}" for n in range(4)}, "object": {"object"}}
    assert used - {"the manifest"} == expected.get(
        source, {"parity", *(f"memory of node {n}" for n in (0, 1, 3))}
    )
    assert content(step_of(run, 10)) == before
    assert sirara("ckpt", "verify", run).exit_code == 0


def test_repair_names_what_no_copy_has_with_exit_65(run):
    flip_bit(step_of(run, 8) / "model.safetensors", 4100)
    result = sirara("ckpt", "repair", run)
    assert result.exit_code == 65
    assert "step-000000010: good, nothing to repair" in result.stdout
    assert "step-000000008: 0 repaired, 1 cannot be" in result.stdout
    assert "  model.safetensors: embed.weight[0:" in result.stdout and "no copy has it" in result.stdout


def test_repair_takes_a_replica_and_refuses_one_of_another_save(run, tmp_path):
    shutil.copytree(step_of(run, 8), tmp_path / "backup")
    (step_of(run, 8) / MANIFEST).write_text("{")
    (step_of(run, 8) / "optim-0-0.safetensors").unlink()
    result = sirara("ckpt", "repair", run, "--step", 8)
    assert result.exit_code == 65 and "cannot be repaired" in result.stdout
    result = sirara("ckpt", "repair", run, "--step", 8, "--from", tmp_path / "backup", "--json")
    assert result.exit_code == 0, result.output
    mended = json.loads(result.stdout)["steps"][0]["mended"]
    assert mended[0]["file"] == MANIFEST and {m["from"] for m in mended} == {str(tmp_path / "backup")}
    assert content(step_of(run, 8)) == content(tmp_path / "backup")
    result = sirara("ckpt", "repair", run, "--step", 10, "--from", tmp_path / "nothing")
    assert result.exit_code == 2 and "does not exist" in result.stderr


def test_repair_leaves_a_step_of_another_run_and_one_that_was_renamed_alone(run, tmp_path):
    other = save(tmp_path / "other", 9, small_state(9), run="other")
    shutil.copytree(other, step_of(run, 9))
    shutil.copytree(step_of(run, 8), step_of(run, 7))
    before = content(step_of(run, 9))
    result = sirara("ckpt", "repair", run)
    assert result.exit_code == 65
    assert "belongs to run 'other'" in result.stdout and "holds step 8: it was renamed" in result.stdout
    assert content(step_of(run, 9)) == before


@pytest.mark.parametrize("source", ["images", "objects"])
def test_repair_rebuilds_a_step_whose_folder_is_gone(run, request, source):
    request.getfixturevalue(source)
    before = content(step_of(run, 10))
    shutil.rmtree(step_of(run, 10))
    result = sirara("ckpt", "repair", run, "--step", 10)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{step_name(10)}: rebuilt: ") and "parts from" in result.stdout
    assert committed_steps(run / "checkpoints") == [10, 8]
    assert differing(load(Snapshot(step_of(run, 10)), small_state(10)), small_state(10)) == []
    assert content(step_of(run, 10)).keys() == before.keys()
    result = sirara("ckpt", "repair", run, "--step", 9)
    assert result.exit_code == 65 and "no other place has it" in result.stdout


def test_repair_of_one_steps_folder_works_without_a_run(run, tmp_path):
    shutil.copytree(step_of(run, 8), tmp_path / "a")
    shutil.copytree(step_of(run, 8), tmp_path / "b")
    flip_bit(tmp_path / "a" / "model.safetensors", 4100)
    assert sirara("ckpt", "repair", tmp_path / "a", "--from", tmp_path / "b").exit_code == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    result = sirara("ckpt", "repair", tmp_path / "a", "--step", 8)
    assert result.exit_code == 2 and "is one step's folder already" in result.stderr


# ---- why


def test_why_tells_what_a_resume_takes_and_from_where(run, images, objects):
    result = sirara("ckpt", "why", run)
    assert result.exit_code == 0, result.output
    assert "a resume takes step 10, from disk, memory of node 0, memory of node 1" in result.stdout
    shown = json.loads(sirara("ckpt", "why", run, "--json").stdout)
    assert shown["takes"] == 10 and [s["step"] for s in shown["saves"]] == [10, 8]
    places = [f["place"] for f in shown["saves"][0]["found"]]
    assert places == ["disk", *(f"memory of node {n}" for n in range(4)), "parity", "object"]
    assert all(s["restorable"] for s in shown["saves"])


def test_why_counts_pieces_over_all_places(run, images, tmp_path):
    shutil.rmtree(step_of(run, 10))
    assert json.loads(sirara("ckpt", "why", run, "--json").stdout)["takes"] == 10
    shutil.rmtree(images / "node-0")  # one node of 3 + 1 may go
    assert json.loads(sirara("ckpt", "why", run, "--json").stdout)["takes"] == 10
    shutil.rmtree(images / "node-1")
    result = sirara("ckpt", "why", run)
    assert result.exit_code == 0 and "a resume takes step 8, from disk" in result.stdout
    assert (
        "step 10 cannot be taken: " in result.stdout
        and "pieces are nowhere, the first is embed.weight" in result.stdout
    )


def test_why_tells_of_a_swapped_file_and_what_a_resume_would_do(run, images):
    for step in (8, 10):
        path = step_of(run, step) / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    result = sirara("ckpt", "why", run)
    assert result.exit_code == 0 and result.stdout.count("WRITTEN SINCE: model.safetensors") == 2
    assert "verified" not in result.stdout and "`sirara ckpt verify` reads the bytes" in result.stdout
    assert "a resume says so and takes these pieces from the other places" in result.stdout
    shown = json.loads(sirara("ckpt", "why", run, "--json").stdout)
    assert [f["changed"] for f in shown["saves"][0]["found"]][:2] == [["model.safetensors"], []]
    shutil.rmtree(images)
    assert "a resume says so and takes step 8" in sirara("ckpt", "why", run).stdout


def test_repair_that_finds_a_written_file_good_notes_that_it_was_read(run):
    path = step_of(run, 8) / "model.safetensors"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**7))
    assert "WRITTEN SINCE" in sirara("ckpt", "ls", run).stdout
    assert sirara("ckpt", "repair", run, "--step", 8).exit_code == 0
    assert "WRITTEN SINCE" not in sirara("ckpt", "ls", run).stdout


def test_why_asks_the_nodes_that_a_resume_asks(run, images):
    """Step 10 lies on four nodes, 3 + 1: three of them are enough, and a resume on two asks two."""
    shutil.rmtree(step_of(run, 10))
    events(run, {"kind": "start", "nodes": 4})
    assert "a resume on 4 nodes takes step 10, from memory of node 0" in sirara("ckpt", "why", run).stdout
    assert "a resume on 3 nodes takes step 10" in sirara("ckpt", "why", run, "--nodes", 3).stdout
    result = sirara("ckpt", "why", run, "--nodes", 2)
    assert result.exit_code == 0 and "a resume on 2 nodes takes step 8, from disk\n" in result.stdout
    assert "committed; not asked by a resume on 2 nodes" in result.stdout
    assert "pieces are only in " in result.stdout and "memory of node 3" in result.stdout
    events(run, {"kind": "start", "nodes": 4}, {"kind": "resume", "from_step": 10, "nodes": 1})
    shown = json.loads(sirara("ckpt", "why", run, "--json").stdout)
    assert (shown["nodes"], shown["takes"]) == (1, 8)
    assert {f["place"]: f["asked"] for f in shown["saves"][0]["found"]}["memory of node 2"] is False


@pytest.mark.parametrize("lost", [(), (1,), (1, 2), (3,)])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_why_and_a_resume_take_the_same_step(run, images, tmp_path, nodes, lost):
    shutil.rmtree(step_of(run, 10))
    for node in lost:
        shutil.rmtree(images / f"node-{node}")
    views = {
        n: LocalNode([GenerationStore(images / f"node-{n}", RUN)], name=f"node {n}") for n in range(nodes)
    }

    def decode(node, step, uuid, rank):
        """One rank leads here: what each node would decode is decoded on all."""
        every = list(views.values())
        return [rebuild(step, uuid, rank, nodes=every, store=view.stores[0]) for view in every][node]

    found = Restorer(
        checkpoints=run / "checkpoints",
        control=run / "control",
        run=RUN,
        attempt=2,
        rank=0,
        node=0,
        agree=lambda fault: fault,
        texts=lambda text: [text],
        views=views,
        decode=decode,
    ).restore(lambda snapshot: load(snapshot, small_state()) and None, distrust=lambda *_: None)
    told = json.loads(sirara("ckpt", "why", run, "--nodes", nodes, "--json").stdout)
    assert told["takes"] == found[1].step


def test_why_explains_damage_leftovers_failures_and_the_last_resume(run):
    checkpoints = run / "checkpoints"
    os.truncate(step_of(run, 10) / "optim-0-0.safetensors", 5000)
    save(checkpoints, 11, small_state(1), run="other")
    (checkpoints / f".{step_name(12)}.tmp-{save_uuid('r', 3, 12, 0)}").mkdir()
    (checkpoints / step_name(4)).mkdir()
    events(
        run,
        {"kind": "start"},
        {"kind": "save", "step": 6},
        {"kind": "save", "step": 8},
        {"kind": "save", "step": 99},
        {"kind": "resume", "from_step": 8, "attempt": 2, "skipped": [[10, "a file is truncated"]]},
        {"kind": "save_failed", "step": 9, "error": "error[SR601]: no space left\n  where   x"},
        {"kind": "save_skipped", "step": 12},
        {"kind": "save", "step": 13, "tiers": ["memory"]},
    )
    result = sirara("ckpt", "why", run)
    assert result.exit_code == 0
    out = result.stdout
    assert "a resume takes step 8, from disk" in out
    assert "optim-0-0.safetensors is truncated: 5000 bytes" in out and "step 10 cannot be taken: " in out
    assert "step 11 cannot be taken: " in out and "belongs to run 'other'" in out
    assert "a save of attempt 3 that did not end" in out and f"{step_name(4)}: it has no manifest.json" in out
    assert "step 9 could not be saved: error[SR601]: no space left\n" in out
    assert "step 12 was not saved: a save was still running" in out
    assert "step 13 was saved (memory) and is gone" in out
    assert (
        "step 6" not in out and "step 99" not in out
    )  # older than what is taken; of a life that was given up
    assert (
        "the last resume (attempt 2) went on from step 8\n  it did not take step 10: a file is truncated"
        in out
    )


def test_why_of_a_run_that_lost_everything_is_exit_65_and_of_a_new_one_0(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    result = sirara("ckpt", "why", run)
    assert result.exit_code == 0 and "nothing was saved yet" in result.stdout
    events(run, {"kind": "start"}, {"kind": "save", "step": 6})
    result = sirara("ckpt", "why", run)
    assert result.exit_code == 65 and "no step can be restored" in result.stdout


def test_places_that_cannot_be_asked_are_said(run):
    (run / "config.yaml").write_text("name: demo\n")
    for verb in ("why", "verify", "repair"):
        result = sirara("ckpt", verb, run)
        assert result.exit_code == 0 and "not asked: the tiers that " in result.stdout, result.output
        assert json.loads(sirara("ckpt", verb, run, "--json").stdout)["unasked"]


def test_a_run_whose_steps_are_elsewhere_is_told_how_to_find_and_rebuild_them(run):
    shutil.rmtree(run / "checkpoints")
    result = sirara("ckpt", "repair", run)
    assert result.exit_code == 65 and "--step N rebuilds one that other places keep" in result.stderr
    (run / "config.yaml").write_text("name: demo\n")
    result = sirara("ckpt", "verify", run)
    assert result.exit_code == 65 and "not asked: the tiers that " in result.stdout


def test_what_is_wrong_with_a_manifest_and_why_are_two_parts_of_one_sentence(run):
    (step_of(run, 8) / MANIFEST).write_text("{}\n")
    result = sirara("ckpt", "repair", run, "--step", 8)
    assert result.exit_code == 65, result.output
    assert "cannot be repaired: the files are of save" in result.stdout


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["why", "nothing"], 2, "there is no run 'nothing'"),
        (["why", "STEP"], 2, "is no run"),
        (["verify", "RUN", "--step", "7"], 2, "step 7 has no committed checkpoint"),
        (["verify", "STEP", "--step", "8"], 2, "is one step's folder already"),
        (["repair", "nothing"], 2, "there is no run 'nothing'"),
    ],
)
def test_wrong_arguments_are_answered_with_one_clear_line(run, args, code, message):
    places = {"RUN": str(run), "STEP": str(step_of(run, 8))}
    result = sirara("ckpt", *(places.get(a, a) for a in args))
    assert result.exit_code == code, result.output
    assert message in result.stderr and "Traceback" not in result.stderr
