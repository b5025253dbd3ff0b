"""Tiers, intervals and retention that cannot work are refused with the file still open."""

from pathlib import Path

import pytest

from sirara.config.check_tiers import STORE_URLS, check_nodes
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError

OBJECT = {"tier": "object", "url": "s3://bucket/runs"}


def config(*, train: dict | None = None, evals: tuple[str, ...] = (), **checkpoint) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"preset": "gpt2"},
            "data": {
                "train": [{"path": "x"}],
                "seq_len": 32,
                "eval": [{"name": n, "path": n} for n in evals],
            },
            "train": {"steps": 100, "global_batch": 12, "micro_batch": 3, **(train or {})},
            "checkpoint": {"every": 10, **checkpoint},
        }
    )


def refused(**settings) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    return caught.value


@pytest.mark.parametrize(
    "tiers",
    [
        ["disk"],
        ["memory", {"tier": "peer", "copies": 3}, {"tier": "parity", "data": 6, "parity": 2}, "disk", OBJECT],
        [
            {"tier": "memory", "every": 3, "path": "/dev/shm/x/{node}"},
            {"tier": "disk", "path": "/nvme/{node}"},
        ],
        ["disk", {**OBJECT, "every": 30, "options": {"endpoint": "http://127.0.0.1:1"}}],
        [{"tier": "disk", "every": 7}, {**OBJECT, "every": 21}],
        *(["disk", {"tier": "object", "url": url}] for url in (*STORE_URLS, "S3://bucket/runs")),
    ],
)
def test_tiers_that_can_work_are_accepted(tiers):
    assert len(config(tiers=tiers).checkpoint.tiers) == len(tiers)


def test_options_of_a_store_are_texts_whatever_yaml_makes_of_them():
    options = {"endpoint": "http://127.0.0.1:1", "allow_http": True, "timeout": 30, "factor": 1.5}
    tier = config(tiers=["disk", {**OBJECT, "options": options}]).checkpoint.tiers[1]
    assert tier.options == {
        "endpoint": "http://127.0.0.1:1", "allow_http": "true", "timeout": "30", "factor": "1.5"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tiers", "message", "where", "advice"),
    [
        (["memory"], "has no disk", "checkpoint.tiers", "checkpoint.tiers=[memory, disk]"),
        (["disk", "memory", "disk"], "names disk twice", "checkpoint.tiers.2", "one of them"),
        (["disk", "object"], "needs a url, not null", "checkpoint.tiers.1.url", "s3://BUCKET"),
        (
            ["disk", {"tier": "object", "url": "bucket"}],
            "needs a url, not bucket",
            "checkpoint.tiers.1.url",
            "s3://",
        ),
        (
            ["disk", {**OBJECT, "every": 15}],
            "every 15 steps, the tier disk every 10",
            "checkpoint.tiers.1",
            "every: 20",
        ),
        (
            ["disk", {"tier": "memory", "path": "/dev/shm/{nod}"}],
            "another word in braces than {node}",
            "checkpoint.tiers.1.path",
            "{node}",
        ),
        (
            ["disk", {"tier": "memory", "path": "shm/{node}"}],
            "path=shm/{node} is not absolute",
            "checkpoint.tiers.1.path",
            f"path: {Path.cwd()}/shm/{{node}}",
        ),
        (
            [{"tier": "disk", "path": "~/{node}"}],
            "path=~/{node} is not absolute",
            "checkpoint.tiers.0.path",
            f"path: {Path.home()}/{{node}}",
        ),
        (
            ["disk", {"tier": "object", "url": "hdfs://bucket/runs"}],
            "url=hdfs://bucket/runs is of no store that is known",
            "checkpoint.tiers.1.url",
            "url: gs://BUCKET/PREFIX",
        ),
        (
            ["disk", {"tier": "object", "url": "http://127.0.0.1:9000"}],
            "url=http://127.0.0.1:9000 is of no store that is known",
            "checkpoint.tiers.1.url",
            "url: s3://BUCKET/PREFIX, options: {endpoint: http://127.0.0.1:9000}",
        ),
        (
            ["disk", {"tier": "object", "url": "s3:///runs"}],
            "url=s3:///runs names no bucket",
            "checkpoint.tiers.1.url",
            "url: s3://BUCKET/runs",
        ),
        (
            ["disk", {"tier": "object", "url": "gs://my bucket/runs"}],
            "url=gs://my bucket/runs names no bucket",
            "checkpoint.tiers.1.url",
            "url: gs://BUCKET/runs",
        ),
        (
            ["disk", {"tier": "object", "url": "file://runs"}],
            "url=file://runs names no folder from the root on",
            "checkpoint.tiers.1.url",
            f"url: file://{Path.cwd()}/runs",
        ),
        (
            ["disk", {"tier": "memory", "copies": 3}],
            "copies=3 has no meaning for the tier memory",
            "checkpoint.tiers.1.copies",
            "tier: peer",
        ),
        (
            ["disk", {"tier": "peer", "data": 5}],
            "data=5 has no meaning for the tier peer",
            "checkpoint.tiers.1.data",
            "tier: parity",
        ),
        (
            [{"tier": "disk", "url": "s3://a/b"}],
            "url=s3://a/b has no meaning for the tier disk",
            "checkpoint.tiers.0.url",
            "tier: object",
        ),
        (
            ["disk", {**OBJECT, "path": "x"}],
            "path=x has no meaning for the tier object",
            "checkpoint.tiers.1.path",
            "tier: memory",
        ),
        (
            ["disk", {"tier": "parity", "data": 254, "parity": 2}],
            "more than 255 nodes",
            "checkpoint.tiers.1.data",
            "data: 8",
        ),
    ],
)
def test_tiers_that_cannot_work_are_refused(tiers, message, where, advice):
    error = refused(tiers=tiers)
    assert message in error.what and error.where == where
    assert any(advice in t for t in error.try_)


def test_an_object_store_beside_a_disk_that_is_written_at_the_end_alone_is_refused():
    error = refused(every=None, tiers=["disk", {**OBJECT, "every": 50}])
    assert "the tier disk at the end and on request only" in error.what
    assert error.try_ == ("checkpoint.every=50",)


@pytest.mark.parametrize(
    ("tier", "nodes", "message"),
    [
        ({"tier": "peer", "copies": 3}, 2, "asks for 3 nodes, the run has 2"),
        ({"tier": "peer"}, 1, "asks for 2 nodes, the run has 1"),
        ({"tier": "parity", "data": 4, "parity": 2}, 5, "asks for 6 nodes, the run has 5"),
        ({"tier": "parity", "data": 2, "parity": 1, "domains": ["a", "b"]}, 3, "has 2 domains for 3 nodes"),
    ],
)
def test_copies_ask_for_nodes(tier, nodes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_nodes(config(tiers=["disk", tier]), nodes)
    assert caught.value.try_
    check_nodes(config(tiers=["disk", {**tier, "domains": []}]), 6)
    check_nodes(config(tiers=["disk", "memory", OBJECT]), 1)


def test_keep_best_names_the_loss_of_an_evaluation_set():
    evals = {"evals": ("held", "books"), "train": {"eval_every": 10}}
    assert config(keep_best="eval/held/loss", **evals).checkpoint.keep_best == "eval/held/loss"
    error = refused(keep_best="eval/hold/loss", **evals)
    assert error.where == "checkpoint.keep_best" and "eval/held/loss, eval/books/loss" in error.why
    assert error.try_[0] == "checkpoint.keep_best=eval/held/loss"
    assert refused(keep_best="eval/held/loss").why == "data.eval is empty"
    assert refused(keep_best="eval/held/loss", evals=("held",)).try_ == ("train.eval_every=10",)
