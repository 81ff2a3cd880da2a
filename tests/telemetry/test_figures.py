"""HardwareMonitor: measured by each process, gathered with the losses, never in the way. GPUs' own
are in test_gpu."""

from __future__ import annotations

import logging
import math
import os
import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.distributed.world import World
from ddp_train.tasks.mean_loss import RunningLoss
from ddp_train.telemetry import gpu_sampler, hardware_monitor
from ddp_train.telemetry.figures import GIB, GPU_METRICS, combined, summary_line
from ddp_train.telemetry.gpu_sampler import GpuSampler, nvml_device
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from tests.support.ranks import on_ranks

SECOND = "GPU-22222222-0000-0000-0000-000000000000"
SLICE = "MIG-33333333-0000-0000-0000-000000000000"


def busy(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def interval(world: World) -> tuple[float, dict[str, Any], dict[str, float]]:
    """Rank 1 is busy; each rank pretends to hold another number of GiB."""
    hardware_monitor.resident_bytes = lambda: (world.rank + 1) * GIB
    measured = HardwareMonitor()
    losses = RunningLoss()
    plan = BatchPlan(
        samples=6,
        global_batch_size=6,
        accumulation_steps=1,
        steps=1,
        seed=0,
        rank=world.rank,
        world_size=3,
    )
    for micro_batch in plan.micro_batches():
        losses.add(6.0 * (world.rank + 1), micro_batch.num_real, micro_batch)
    measured.collect()
    busy(0.2) if world.rank == 1 else time.sleep(0.2)
    return losses.mean("cpu", [measured]).value, measured.take_interval(0.2), measured.summary()


def test_every_rank_tells_in_the_exchange_of_the_losses() -> None:
    for loss, line, summary in on_ranks(3, interval):
        assert loss == 6.0  # (6 + 12 + 18) / 6 samples
        assert line["resident_gib"] == [1, 2, 3]
        assert line["cpu_cores"][1] > 2 * max(line["cpu_cores"][0], line["cpu_cores"][2])
        assert set(line) == {"resident_gib", "cpu_cores"}, "no GPU, no figures of it"
        assert summary["resident_gib"] == 3 and summary["cpu_cores"] == pytest.approx(
            sum(line["cpu_cores"]) / 3, 0.01
        )


def test_a_run_that_goes_on_tells_of_the_whole_of_it() -> None:
    def fed(measured: HardwareMonitor, cores: float, gib: float, seconds: float) -> HardwareMonitor:
        measured.deliver([[cores, gib]])
        measured.take_interval(seconds)
        return measured

    first = fed(HardwareMonitor(), cores=1.0, gib=5.0, seconds=30.0)
    second = HardwareMonitor()
    second.load_state(first.state())
    assert fed(second, cores=3.0, gib=2.0, seconds=10.0).summary() == {
        "cpu_cores": 1.5,
        "resident_gib": 5.0,
    }


def test_what_is_not_known_is_left_out() -> None:
    assert (
        combined("mean", [1.0, math.nan, None, 3.0]) == 2 and combined("sum", [1.0, math.nan]) == 1
    )
    assert math.isnan(combined("max", [math.nan, None]))
    assert summary_line({"cpu_cores": 1.0}) == ""
    assert summary_line({"gpu_memory_gib": 61.24, "power_watts": 640.0}) == "GPU 61.2 GiB 640 W"


class Nvml:
    """A host with two GPUs, the second cut into slices; in place of the library's functions that
    are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known = {"GPU-11111111-0000-0000-0000-000000000000": 0, SECOND: 1, SLICE: 2}
        self.utilisation = 50
        self.joules = 3600.0
        for name, answer in {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": self.handle,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=self.utilisation),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=4 * GIB),
            "nvmlDeviceGetPowerUsage": self.power,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 60,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self.joules * 1000,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=1, usedGpuMemory=9 * GIB),
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB),
            ],
        }.items():
            monkeypatch.setattr(pynvml, name, answer)
        uuids = [name.removeprefix("GPU-") for name in self.known]
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number])
        )
        monkeypatch.setattr(gpu_sampler, "peak_of_torch", lambda number: 2 * GIB)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda number: None)

    def handle(self, name: str) -> int:
        if name not in self.known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.known[name]

    def power(self, handle: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_gpu_is_found_by_what_cuda_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch)
    second = SECOND.removeprefix("GPU-")
    parent = SECOND.removeprefix("GPU-")
    for visible in (
        None,
        "1",
        "1,0",
        SECOND,
        f"{SECOND},0",
    ):  # CUDA has numbered them anew: its UUID alone counts
        assert nvml_device(second, 0, visible) == 1
    assert nvml_device(parent, 0, SLICE) == 2, "CUDA may name the GPU that a slice is cut from"
    assert nvml_device(SLICE.removeprefix("MIG-"), 0, None) == 2
    assert nvml_device(parent, 0, "MIG-GPU-22222222/1/0") == 1, (
        "a name that NVML does not know any more"
    )
    with pytest.raises(pynvml.NVMLError):
        nvml_device("44444444-0000-0000-0000-000000000000", 0, None)


def test_samples_become_one_number_and_a_gap_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Nvml(monkeypatch)
    names = list(GPU_METRICS)
    with caplog.at_level(logging.INFO):
        gpus = GpuSampler([0, 1], None)
        gpus.sample()
        gpus.take()
        nvml.utilisation = 80
        nvml.joules = 3 * 3600.0
        gpus.sample()
        nvml.utilisation = 100
        gpus.sample()
        numbers = dict(zip(names, gpus.take(), strict=False))
        again = dict(zip(names, gpus.take(), strict=False))
    assert len(gpus.take()) == 2 * len(GPU_METRICS)
    assert numbers["gpu_utilisation"] == 90, "none is counted twice"
    assert (numbers["energy_wh"], again["energy_wh"]) == (2, 0)
    assert (again["gpu_utilisation"], again["gpu_memory_gib"]) == (100, 4), (
        "the latest, where there is none since"
    )
    assert (numbers["process_gpu_memory_gib"], numbers["torch_memory_gib"]) == (3, 2)
    assert math.isnan(numbers["power_watts"])
    assert [r.message for r in caplog.records] == [
        "some measurements of the GPUs are missing, since NVML answered: Not Supported"
    ]
    measured = HardwareMonitor(gpus)
    nvml.joules = 6 * 3600.0
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda number: gpus.sample()
    )  # what takes energy ends then
    measured.deliver([measured.collect()])
    line = measured.take_interval(1.0)
    assert "power_watts" not in line and line["temperature_celsius"] == [60, 60]
    assert line["energy_wh"] == [3, 3], "it is of work that is done"
    assert measured.gpu_text() == "GPU 100% 4.0 GiB"


def test_without_nvml_there_are_no_figures_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Nvml(monkeypatch)

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with caplog.at_level(logging.INFO):
        gpus = GpuSampler([0], None)
    gpus.start()
    measured = HardwareMonitor(gpus)
    measured.deliver([measured.collect()])
    assert set(measured.take_interval(1.0)) == {"cpu_cores", "resident_gib", "torch_memory_gib"}
    assert len(caplog.records) == 1 and "Shared Library Not Found" in caplog.text
