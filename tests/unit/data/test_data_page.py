"""docs/data.md is exact: its programs read a store and find the samples of a run."""

import re
from pathlib import Path

import numpy as np

from sirara.data.store import write_store
from sirara.pure.order import PERIOD, SampleOrder, Source

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def programs():
    space = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, space)
    return space


def test_the_reader_of_the_page_reads_a_store(tmp_path):
    documents = [np.arange(5), np.arange(70, 90)]
    for vocab in (100, 70_000):
        write_store(tmp_path / str(vocab), documents, vocab=vocab, eot=99)
        tokens, offsets = programs()["read_store"](tmp_path / str(vocab))
        assert tokens.tolist() == [*range(5), 99, *range(70, 90), 99]
        assert offsets.tolist() == [0, 6, 27]


def test_the_order_of_the_page_is_the_order_of_a_run():
    sample = programs()["sample"]
    for tokens, seed in ((2, 0), (100, 1), (8001, 2**63 + 5), (2**40 + 3, 7)):
        order = SampleOrder.begin(
            [Source(id="abc#0", name="s", tokens=tokens)], [PERIOD], seed=seed, seq_len=8
        )
        size = order.samples_per_epoch(0)
        for first in (0, size - 1, 3 * size, 10**6):
            located = order.locate(first, 20)
            wanted = [sample(seed, "abc#0", i // size, i % size, size) for i in range(first, first + 20)]
            assert located.index.tolist() == wanted
