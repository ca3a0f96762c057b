"""The energy counter, read from a library that answers as NVML does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from microscale.bench.energy import EnergyMeter
from microscale.cli import load
from microscale.errors import BadSetting, Unsupported

NVML = """
#include <string.h>
static unsigned long long spent = 1500;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
    *gpu = strcmp(uuid, "GPU-old") ? (void *)7 : (void *)8;
    return strcmp(uuid, "GPU-none") ? 0 : 6;
}
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *energy) {
    *energy = (spent += 250);
    return gpu == (void *)7 ? 0 : 3;
}
const char *nvmlErrorString(int error) { return error == 3 ? "Not Supported" : "Not Found"; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "nvml.c"), "-o", str(folder / "libstub.so")], check=True)
    return str(folder / "libstub.so")


def test_millijoules_are_joules(library: str) -> None:
    meter = EnergyMeter("GPU-new", library)
    before = meter.joules()
    assert meter.joules() - before == pytest.approx(0.25)


@pytest.mark.parametrize(("uuid", "reason"), [("GPU-none", "Not Found"), ("GPU-old", "Not Supported")])
def test_a_gpu_without_a_counter_is_told_before_anything_runs(library: str, uuid: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=f"{reason}.*leave out --energy"):
        EnergyMeter(uuid, library)


def test_no_driver_is_told() -> None:
    with pytest.raises(Unsupported, match=r"is missing; .* leave out --energy"):
        EnergyMeter("GPU-new", "libnone.so.1")


@pytest.mark.parametrize(
    ("option", "said"),
    [(["--device", "cpu"], "runs on the CPU"), (["--tensor-parallel-size", "2"], "one GPU's counter")],
)
def test_energy_is_one_gpus(option: list[str], said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        load("bench")(["gpt-oss-tiny", "--load-format", "dummy", "--energy", *option], standalone_mode=False)
