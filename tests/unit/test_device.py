"""The device of a rank, and MKL's reproducible mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sirara.device import open_device, reproducible_mkl

INTEL = "vendor_id : GenuineIntel\nflags\t\t: fpu sse2 avx2 {}\nbugs: none\n"


@pytest.mark.parametrize(
    ("cpuinfo", "mode"),
    [
        (INTEL.format("avx512f avx512_vnni amx_tile"), "AVX512_E1,STRICT"),
        (INTEL.format("avx512f"), "AVX512,STRICT"),
        (INTEL.format(""), "AVX2,STRICT"),
        (INTEL.format("avx512f").replace("GenuineIntel", "AuthenticAMD"), ""),
        ("", ""),
    ],
)
def test_the_strict_mode_of_the_widest_instructions_is_chosen(cpuinfo: str, mode: str) -> None:
    assert reproducible_mkl(cpuinfo) == mode


PRODUCTS = """
import sys, torch
from sirara.device import open_device
open_device(local_rank=0, exact=sys.argv[1] == "exact")
torch.manual_seed(0)
x, w = torch.randn(1024, 4096), torch.randn(4096, 512)
found = []
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    found.append(x @ w)
print(all(torch.equal(f, found[0]) for f in found))
"""


def products(numerics: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"} | {"SIRARA_DEVICE": "cpu"}
    command = [sys.executable, "-c", PRODUCTS, numerics]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(
    not reproducible_mkl(Path("/proc/cpuinfo").read_text()),
    reason="this processor has no reproducible mode of MKL",
)
def test_exact_numerics_give_long_sums_equal_bits_for_any_threads() -> None:
    assert products("exact") == "True"


def test_the_users_own_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRARA_DEVICE", "cpu")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    open_device(local_rank=0, exact=True)
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
