"""Reed-Solomon on one core: GB of data per second, by ISA-L and by numpy, beside a copy of the same bytes.

    python -m benchmarks.checkpoint_parity [--mib 64]

encode   all parity of k blocks in one pass
update   block by block as they arrive (what a holder of parity does), one row
decode   m lost blocks of data from the others
Seconds of processor time of the one thread, so that other processes on the machine disturb little; medians.
"""

import argparse
import json
import statistics
import time

import numpy as np

from sirara.checkpoint import isal
from sirara.pure import erasure

CODES = [(4, 2), (8, 2), (8, 4), (3, 1)]
REPEATS = 7
CHUNK = 4 << 20


def median_s(call):
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def measure(k, m, size):
    length = size // k // 64 * 64
    data = list(np.random.default_rng(0).integers(0, 256, (k, length), dtype=np.uint8))
    parity = list(np.zeros((m, length), np.uint8))
    lost = list(range(min(k, m)))
    out = list(np.zeros((len(lost), length), np.uint8))
    row, sum_ = erasure.coefficients(k, m)[0], np.zeros(length, np.uint8)

    def chunks():
        return [slice(at, min(length, at + CHUNK)) for at in range(0, length, CHUNK)]

    def encode():
        for c in chunks():
            isal.combine(erasure.coefficients(k, m), [d[c] for d in data], [p[c] for p in parity])

    def update():
        for j in range(k):
            for c in chunks():
                isal.encode_update(int(row[j]), data[j][c], sum_[c])

    encode()
    left = {i: b for i, b in enumerate([*data, *parity]) if i not in lost}
    have = sorted(left)[:k]

    def decode():
        for c in chunks():
            isal.combine(erasure.decoding(k, m, have, lost), [left[i][c] for i in have], [o[c] for o in out])

    total = k * length / 1e9
    rates = {
        name: total / median_s(call)
        for name, call in (("encode", encode), ("update", update), ("decode", decode))
    }
    assert all((o == data[i]).all() for i, o in zip(lost, out, strict=True))
    small = [d[: 1 << 20] for d in data]
    rates["numpy encode"] = k * len(small[0]) / 1e9 / median_s(lambda: erasure.encode(small, m))
    whole, copy = np.concatenate(data), np.zeros(k * length, np.uint8)
    rates["copy"] = total / median_s(lambda: np.copyto(copy, whole))
    return rates


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    size = parser.parse_args().mib << 20
    for k, m in CODES:
        rates = measure(k, m, size)
        print(
            json.dumps(
                {"code": f"{k}+{m}", "isal": isal.is_fast(), **{n: round(r, 2) for n, r in rates.items()}}
            )
        )


if __name__ == "__main__":
    main()
