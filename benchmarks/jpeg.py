"""How fast an image folder is read: every way to decode, alone, and in training against images that
are there already.

    python benchmarks/jpeg.py [--images 16384] [--batch 256] [--steps 40] [--output FILE]

The images are made: 64 JPEGs of 500 x 375 pixels with the spectrum of photographs (amplitude 1 /
frequency^1.35), some 51 kB each, hard-linked to --images names in eight classes. The kernel holds
them in memory: this measures no disk.

The first table is `ddp_train.data.loader.Loader` over the training split, random crops of --size
included, on this host's device, with nothing beside it: images per second from the second batch on,
for --seconds. The second is `ddp_train.engine.loop.train` as `build_job` makes it, with the same
compiled model throughout: first over one batch that stays on the device, then from the folder, each
way twice in turns, the better of the two shown; a step is timed from the second round of the
prefetch queue on. On a GPU, what it decodes and crops is compared with what the host does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from page import conditions, load_average, publish
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.assembly.batches import loader_options
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_module
from ddp_train.assembly.strategy import build_strategy
from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.data.batch import Batch
from ddp_train.data.crop import crop_box_for, resize_crops
from ddp_train.data.image_folder.decoder import decode_or_skip
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.loader import Loader
from ddp_train.distributed.environment import visible_devices
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, train
from ddp_train.hardware import detect_hardware
from ddp_train.options.schema import Config
from ddp_train.performance import switches
from ddp_train.resilience.heartbeat import RankStatus

DIFFERENT = 64
CLASSES = 8
WARM_UP = 8


def photograph(number: int, height: int = 375, width: int = 500) -> Image.Image:
    """Noise with the spectrum and the correlated colours of photographs."""
    draw = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1

    def layer(power: float) -> np.ndarray:
        spectrum = draw.standard_normal(frequency.shape) + 1j * draw.standard_normal(
            frequency.shape
        )
        spectrum /= frequency**power
        spectrum[0, 0] = 0
        noise = np.fft.irfft2(spectrum, (height, width))
        return noise / noise.std()

    light = 128 + 55 * layer(1.35)
    red = 15 * layer(1.5)
    blue = 8 * layer(1.5)
    colours = np.stack([light + red, light + (blue - red) / 2, light - blue], -1)
    return Image.fromarray(colours.clip(0, 255).astype(np.uint8))


def make_folder(root: Path, images: int) -> float:
    """The layout of ImageNet. Returns the mean size of a file in bytes."""
    (root / "originals").mkdir(parents=True)
    originals = [root / "originals" / f"{number}.jpg" for number in range(min(DIFFERENT, images))]
    for number, path in enumerate(originals):
        photograph(number).save(path, quality=82)
    for split, count in (("train", images), ("val", CLASSES)):
        for number in range(count):
            place = root / split / f"class_{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            os.link(originals[number % len(originals)], place / f"{number:06}.jpg")
    return float(np.mean([path.stat().st_size for path in originals]))


def config_for(
    arguments: argparse.Namespace,
    root: Path,
    decode: str = "auto",
    workers: int | str = "auto",
    beside: bool | str = "auto",
) -> Config:
    """The config that the launcher would give to a single process on this host.

    beside: value of tuning.copy_stream.
    """
    config, problems = bind(
        {
            "strategy": {"name": "single"},
            "data": {
                "name": "image_folder",
                "root": str(root),
                "image_size": arguments.size,
                "decode": decode,
            },
            "model": {"name": "torchvision", "arch": arguments.arch},
            "train": {"global_batch_size": arguments.batch, "epochs": 10**6},
            "tuning": {
                "num_workers": workers,
                "copy_stream": beside,
                "compile": not arguments.eager,
            },
            "deterministic": False,
        }
    )
    assert not problems, problems
    return resolve(config, detect_hardware(visible_devices()), None)


def loader_of(config: Config, device: str, micro_batches: object) -> Loader:
    return Loader(open_datasets(config)[0], micro_batches, device, loader_options(config))  # type: ignore[arg-type]


def wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def images_per_second(config: Config, job: Job, device: str, seconds: float) -> float:
    """Images per second of a loader alone, from its second batch on."""
    batches = iter(loader_of(config, device, job.plan.micro_batches()))
    next(batches)
    wait_for(device)
    began = time.perf_counter()
    images = 0
    while time.perf_counter() - began < seconds:
        images += len(next(batches).targets)
        wait_for(device)
    return images / (time.perf_counter() - began)


def trained_per_second(job: Job, batches: Iterator[Batch], steps: int, device: str) -> float:
    """Images per second of training, after a warm-up."""
    job.step = 0
    job.stepper.continue_from(0)
    warm_up = min(WARM_UP, steps)
    train(job, batches, until=warm_up)
    wait_for(device)
    began = time.perf_counter()
    train(job, batches, until=warm_up + steps)
    wait_for(device)
    return steps * job.plan.global_batch_size / (time.perf_counter() - began)


def resident(job: Job, batch: Batch) -> Iterator[Batch]:
    """One batch that is there already, again and again."""
    for micro_batch in job.plan.micro_batches():
        yield dataclasses.replace(batch, micro_batch=micro_batch)


def agreement(source: FolderSource, device: torch.device) -> list[str]:
    """The differences between a GPU's crops and the host's."""
    indices = np.arange(min(64, len(source)))
    host = torch.device("cpu")
    files = source.read(indices)
    on_gpu = source.crops_on(device, files, indices, 0).cpu()
    on_host = source.crops_on(host, files, indices, 0)
    whole = [
        image
        for image in decode_or_skip(host, [torch.from_numpy(file) for file in files])
        if image is not None
    ]
    windows = [
        crop_box_for(image.shape[1], image.shape[2], source.image_size, draws and draws[:4])
        for image, draws in zip(whole, source.draws(indices, 0), strict=True)
    ]
    there = resize_crops([image.to(device) for image in whole], windows, source.image_size).cpu()
    same = torch.equal(there, resize_crops(whole, windows, source.image_size))
    by_torchvision = source.get_batch(indices, 0)[0].float()
    return [
        "",
        (
            "- The same decoded pixels, cropped on GPU and host:"
            f" {'the same bytes' if same else 'OTHER BYTES'}."
        ),
        (
            "- Mean absolute difference of a pixel (of 255): decoded on the GPU instead of the"
            f" host {(on_gpu.float() - on_host.float()).abs().mean():.3f}; cropped together instead"
            f" of by torchvision {(on_host.float() - by_torchvision).abs().mean():.3f}."
        ),
    ]


def counts_up_to(cores: int) -> list[int]:
    """1, 2, 4 ... and all cores."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power < cores} | {cores})


def main() -> None:
    parser = argparse.ArgumentParser(description="Reading an image folder, alone and in training.")
    parser.add_argument("--images", type=int, default=16384, help="file names in the training set")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="pixels of a crop's side")
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument(
        "--steps", type=int, default=40, help="timed training steps of each way, twice"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="for each row of the first table"
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--output", type=Path, help="write the page to this file too")
    arguments = parser.parse_args()
    load = f"{load_average()} at the start"
    with tempfile.TemporaryDirectory(prefix="jpeg_") as place:
        root = Path(place, "images")
        size = make_folder(root, arguments.images)
        lines = measure(arguments, root, size)
    load += f", {load_average()} at the end (this benchmark is the most of it)"
    given = f"jpeg.py --images {arguments.images} --batch {arguments.batch} --size {arguments.size}"
    given += f" --arch {arguments.arch} --steps {arguments.steps} --seconds {arguments.seconds:g}"
    given += " --eager" * arguments.eager
    publish([*lines, "", *conditions(given, load, ("torchvision", "pillow"))], arguments.output)


def measure(arguments: argparse.Namespace, root: Path, file_size: float) -> list[str]:
    config = config_for(arguments, root)
    switches.set_process_flags(
        threads=int(config.launch.threads_per_process),
        cudnn_benchmark=bool(config.tuning.cudnn_benchmark),
        tf32=bool(config.tuning.tf32),
        deterministic=bool(config.deterministic),
    )
    device = World().device(config.device)
    gpu = device.startswith("cuda")
    cores = detect_hardware(None).cpus
    sources = open_datasets(config)
    strategy = build_strategy(config, World(), device)
    module = build_module(config, sources[0], strategy, device)
    builder = JobBuilder(config, World(), device, module, strategy, RankStatus())
    job = builder.build_job(sources)
    lines = [
        "# Reading an image folder",
        "",
        (
            f"JPEGs of 500 x 375 pixels, {file_size / 1000:.0f} kB on average, to random crops of"
            f" {arguments.size}, batches of {arguments.batch} on {device}. `auto` is"
            f" data.decode={config.data.decode} here, with"
            f" tuning.num_workers={config.tuning.num_workers}."
        ),
        "",
        "| data.decode | workers | images/s |",
        "|---|---:|---:|",
    ]
    rows = [("processes", count) for count in counts_up_to(cores)] + [("pil", cores)]
    for decode, workers in [*rows, *([("gpu", min(4, cores))] if gpu else [])]:
        speed = images_per_second(
            config_for(arguments, root, decode, workers), job, device, arguments.seconds
        )
        lines.append(f"| {decode} | {workers} | {speed:,.0f} |")
    if gpu:
        source = sources[0]
        assert isinstance(source, FolderSource)
        lines += agreement(source, torch.device(device))
    lines += training(arguments, root, job, device, cores)
    return lines


def training(
    arguments: argparse.Namespace, root: Path, job: Job, device: str, cores: int
) -> list[str]:
    first = next(
        iter(loader_of(config_for(arguments, root), device, [next(job.plan.micro_batches())]))
    )
    ways: dict[str, Callable[[], Iterator[Batch]]] = {
        "a batch on the device": lambda: resident(job, first)
    }

    def folder(
        decode: str, workers: int, beside: bool | str = "auto"
    ) -> Callable[[], Iterator[Batch]]:
        return lambda: iter(
            loader_of(
                config_for(arguments, root, decode, workers, beside),
                device,
                job.plan.micro_batches(),
            )
        )

    ways |= {
        f"processes, {cores}": folder("processes", cores),
        f"pil, {cores}": folder("pil", cores),
    }
    if device.startswith("cuda"):
        ways[f"processes, {cores}, copied in training's stream"] = folder(
            "processes", cores, beside=False
        )
        ways[f"gpu, {min(4, cores)}"] = folder("gpu", min(4, cores))
    best = dict.fromkeys(ways, 0.0)
    for names in (list(ways), list(reversed(ways))):
        for name in names:
            best[name] = max(
                best[name], trained_per_second(job, ways[name](), arguments.steps, device)
            )
    there = best["a batch on the device"]
    compiled = "eager" if arguments.eager else "compiled"
    return [
        "",
        f"Training {arguments.arch}, {compiled}:",
        "",
        "| images from | images/s | of those on the device |",
        "|---|---:|---:|",
        *(f"| {name} | {speed:,.0f} | {speed / there:.1%} |" for name, speed in best.items()),
    ]


if __name__ == "__main__":
    main()
