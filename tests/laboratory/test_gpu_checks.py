"""Checks of GPUs, and hardware as a run sees it: answers of NVML, at the border to that library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml
import pytest

from ddp_lab.doctor import (
    gpu_checks,
    main,
    nvml,
)
from ddp_lab.doctor.findings import FAILURE, OK, SKIPPED, WARNING, Finding
from ddp_train.config.prepare import prepare
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware, detect_hardware
from tests.support.commands import (
    PROGRAM,
)
from tests.support.doctor import (
    DOCTOR,
    is_failure,
    is_warning,
)

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


class Nvml:
    """Answers of NVML for some GPUs; a dict for each, with what is special about it. Healthy ones
    are H200s."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = cards

    def __enter__(self) -> Nvml:
        self.stack = contextlib.ExitStack()
        memory = mock.Mock(total=140 * 2**30, used=2**29)
        asked: dict[str, Callable[..., Any]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "SystemGetDriverVersion": lambda: "575.57.08",
            "SystemGetCudaDriverVersion": lambda: 12090,
            "DeviceGetCount": lambda: self.known(len(self.cards) or None),
            "DeviceGetHandleByIndex": self.handle,
            "DeviceGetHandleByUUID": lambda uuid: self.handle(int(uuid.removeprefix("GPU-"))),
            "DeviceGetUUID": lambda card: f"GPU-{[one is card for one in self.cards].index(True)}",
            "DeviceGetCudaComputeCapability": lambda _: (9, 0),
            "DeviceGetName": lambda card: card.get("name", "NVIDIA H200"),
            "DeviceGetMemoryInfo": lambda card: card.get("memory", memory),
            "DeviceGetRemappedRows": lambda card: card.get("rows", (0, 0, 0, 0)),
            "DeviceGetComputeRunningProcesses": lambda card: card.get("processes", []),
            "DeviceGetTotalEccErrors": lambda card, *_: self.known(card.get("errors", 0)),
            "DeviceGetCurrentClocksThrottleReasons": lambda card: card.get("reasons", 0),
            "DeviceGetClockInfo": lambda card, _: card.get("clock", 1900),
            "DeviceGetMaxClockInfo": lambda card, _: 1980,
            "DeviceGetCurrPcieLinkWidth": lambda card: card.get("width", 16),
            "DeviceGetMaxPcieLinkWidth": lambda card: 16,
            "DeviceGetMaxPcieLinkGeneration": lambda card: 5,
            "DeviceGetNvLinkState": lambda card, link: int(
                self.known(link < card.get("links", 18) or None)
            ),
            "DeviceGetP2PStatus": lambda one, other, way: (
                max(one.get("p2p", 0), other.get("p2p", 0))
                if way == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
                else 0
            ),
            "DeviceGetFieldValues": lambda card, _: [
                mock.Mock(nvmlReturn=pynvml.NVML_SUCCESS, value=mock.Mock(uiVal=26562))
            ],
        }
        for name, answer in asked.items():
            self.stack.enter_context(mock.patch.object(pynvml, f"nvml{name}", answer))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def handle(self, index: int) -> dict[str, Any]:
        if self.cards[index].get("lost"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.cards[index]

    @staticmethod
    def known(value: Any) -> Any:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def gpus(*cards: dict[str, Any], visible: str | None = None, wanted: int = 2) -> dict[str, Finding]:
    """Every finding about some GPUs, by its check."""
    with Nvml(*cards):
        found = nvml.read_gpus(visible)
    return {finding.check: finding for finding in gpu_checks.check_gpus(found, wanted)}


def test_healthy_gpus_have_no_findings() -> None:
    found = gpus({}, {})
    assert {finding.status for finding in found.values()} == {OK}, found
    assert "2 x NVIDIA H200, driver 575.57.08" in found["gpus"].detail
    assert found["gpu links"].detail == "NVLink, 18 links, 478 GB/s each way"


@pytest.mark.parametrize(
    ("card", "check", "status", "words"),
    [
        ({"lost": True}, "gpus", FAILURE, ("GPU 1: GPU is lost", "dmesg")),
        ({"name": "NVIDIA A100"}, "gpu models", WARNING, ("2 kinds", "NVIDIA A100 of 140 GiB")),
        (
            {"memory": mock.Mock(total=2**36, used=2**33)},
            "gpu models",
            WARNING,
            ("2 kinds", "of 64 GiB"),
        ),
        (
            {"memory": mock.Mock(total=2**36, used=2**33)},
            "gpu memory",
            WARNING,
            ("GPU 1: 8.0 of 64.0 GiB",),
        ),
        (
            {"processes": [mock.Mock(pid=77, usedGpuMemory=2**31)]},
            "gpu processes",
            WARNING,
            ("process 77 (2.0 GiB)",),
        ),
        ({"errors": 3}, "gpu ecc", FAILURE, ("GPU 1: 3 uncorrected errors", "nvidia-smi -r")),
        (
            {"rows": (0, 1, 0, 1)},
            "gpu ecc",
            FAILURE,
            ("GPU 1: a memory row could not be replaced",),
        ),
        ({"rows": (0, 1, 1, 0)}, "gpu ecc", WARNING, ("GPU 1: a memory row is due",)),
        ({"errors": None}, "gpu ecc", SKIPPED, ("GPU 1: no ECC",)),
        ({"reasons": 0x40 | 0x1}, "gpu throttling", WARNING, ("GPU 1: too hot (hardware)", "fans")),
        ({"reasons": 0x80}, "gpu throttling", WARNING, ("power brake",)),
        ({"width": 8}, "gpu links", WARNING, ("GPU 1: PCIe x8 of x16",)),
        ({"links": 16}, "gpu links", WARNING, ("GPU 1: 16 of 18 NVLinks",)),
    ],
)
def test_an_ailing_gpu_is_named(
    card: dict[str, Any], check: str, status: str, words: tuple[str, ...]
) -> None:
    finding = gpus({}, card)[check]
    assert finding.status == status, finding
    assert all(word in f"{finding.detail} {finding.remedy}" for word in words), finding


def test_gpus_are_counted_as_cuda_sees_them() -> None:
    is_failure(
        gpus({}, {}, visible="1")["gpus"],
        70,
        "1 GPU visible, 2 processes need one each",
        "CUDA_VISIBLE_DEVICES",
    )
    assert gpus({}, {}, {}, visible="GPU-2,0,9,1")["gpus"].numbers["names"] == {"NVIDIA H200": 2}
    assert gpus({}, visible="", wanted=0)["gpus"].status == SKIPPED


@pytest.mark.parametrize("visible", [None, "0", "0,1", "GPU-0", "GPU-1,GPU-0"])
def test_a_gpu_that_is_lost_is_named_however_it_is_asked_for(visible: str | None) -> None:
    is_failure(gpus({"lost": True}, {}, visible=visible)["gpus"], 70, "GPU 0: GPU is lost", "xid")


@pytest.mark.slow
def test_other_gpus_than_the_lost_one_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that would get the lost one is refused; the doctor is not, which says more."""
    words = [f"run_dir={tmp_path}/run", "launch.nproc_per_node=1"]
    cards: list[dict[str, Any]] = [{"lost": True}, {"name": "NVIDIA A100"}]
    for visible in ("1", "GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus(*cards, visible=visible, wanted=1)["gpus"].status == OK
        with Nvml(*cards):
            assert detect_hardware(visible) == Hardware(
                detect_hardware("").cpus, 1, "NVIDIA A100", (9, 0), 140 * 2**30
            )
            assert prepare(PROGRAM, [*words, *DOCTOR], None).config.device == "cuda"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with Nvml(*cards):
        with pytest.raises(
            ConfigError,
            match="device=cuda: the driver cannot reach GPU 0: GPU is lost; reset this GPU",
        ):
            prepare(PROGRAM, words, None)
        prepared = prepare(PROGRAM, [*words, *DOCTOR], None)
        found, findings = main.check_at_rest(prepared.config, several=False, under_torchrun=False)
    is_failure(findings[0], 70, "GPU 0: GPU is lost")
    assert found and [one.error for one in found.gpus] == ["GPU is lost", ""]
    with Nvml({"lost": True}):
        assert (
            detect_hardware(None).lost == detect_hardware("GPU-0").lost == ("GPU 0: GPU is lost",)
        )


def test_nvlink_is_seen_between_the_gpus_that_are_visible() -> None:
    apart: dict[str, Any] = {"p2p": pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY}
    with Nvml({}, {}, apart):
        assert [detect_hardware(visible).nvlink for visible in (None, "0,1", "1,2")] == [
            False,
            True,
            False,
        ]
        assert not detect_hardware("0").nvlink, "other processes see the others"
    with Nvml({}, {}):
        assert detect_hardware("0").nvlink and detect_hardware("GPU-1,GPU-0").nvlink
        assert not detect_hardware("MIG-1,MIG-2").nvlink, "parts of a GPU have no links"
    with Nvml({}):
        assert not detect_hardware(None).nvlink, "there is no other"
    with Nvml({}, {"lost": True}):
        assert (detect_hardware(None).gpus, detect_hardware(None).nvlink) == (2, False)
    with Nvml({}, {"links": 4}):
        assert not detect_hardware(None).nvlink, "a bridge"


def test_a_driver_that_does_not_count_its_gpus_has_none() -> None:
    with Nvml():
        assert detect_hardware(None).gpus == 0
        with pytest.raises(nvml.NoDriverError, match="Not Supported"):
            nvml.read_gpus(None)


def test_gpu_without_a_driver_is_a_failure(tmp_path: Path) -> None:
    def dead() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    with (
        mock.patch.object(pynvml, "nvmlInit", dead),
        pytest.raises(nvml.NoDriverError) as caught,
    ):
        nvml.read_gpus(None)
    assert gpu_checks.no_driver(caught.value, tmp_path).status == SKIPPED
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    is_failure(
        gpu_checks.no_driver(caught.value, tmp_path),
        70,
        "1 NVIDIA GPU on the PCI bus",
        "mismatch",
        "reboot",
    )


def test_clocks_under_load_are_compared() -> None:
    with Nvml({}, {"clock": 1200}, {"clock": 1300, "reasons": 0x20}, {}):
        loads = {f"rank {number}": nvml.read_load(str(number)) for number in range(4)}
    finding = gpu_checks.clocks(loads)
    is_warning(
        finding, "rank 2: too hot (driver)", "rank 1: 1200 MHz, the others 1600", "nvidia-smi"
    )
    assert gpu_checks.clocks({"rank 0": loads["rank 0"]}).detail == "1900 of 1980 MHz under load"
    assert gpu_checks.clocks({"rank 0": {}}).status == SKIPPED
