"""Image folders: every way to decode gives the pixels that it promises, for every file, or names
the file."""

from __future__ import annotations

import io
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import make_dataset
from torchvision.transforms.v2 import functional

from ddp_train.config.auto import resolve
from ddp_train.data import crop
from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batches
from ddp_train.data.image_folder.config import ImageFolderConfig
from ddp_train.data.image_folder.decoder import require_decoder
from ddp_train.data.image_folder.source import IMAGENET_MEAN, IMAGENET_STD, FolderSource
from ddp_train.data.loader import Loader
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.options.sections import TuningConfig
from tests.support.commands import THREE, read, run, weights
from tests.support.jobs import config_of, datasets_of, loader_of
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding:DeprecationWarning"
)  # of torchvision 0.29
DECODERS = ("pil", "processes", "gpu")
"""The last decodes on whatever device it is given: here, on the CPU."""
SIZE = 24
DRAWS = [
    (0.9, 0.5, 0.5, 0.5),
    (0.1, 0.9, 0.2, 0.7),
    (0.5, 0.1, 0.99, 0.0),
    (0.0, 0.5, 0.0, 0.99),
    None,
]


def picture(seed: int, height: int = 60, width: int = 80) -> np.ndarray:
    """Smooth shapes with some noise, uint8 [height, width, 3]."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.BICUBIC
    )
    return (
        (np.asarray(coarse) + draw.normal(0, 8, (height, width, 3))).clip(0, 255).astype(np.uint8)
    )


def write_folder(root: Path, images: int = 36, ends: str = ".jpg") -> Path:
    """Two classes; `images` to train on and six to test, of different sizes, upright ones among
    them."""
    for split, count in (("train", images), ("val", 6)):
        for number in range(count):
            path = root / split / "ab"[number % 2] / f"{number:03}{ends}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture(number, 40 + 3 * (number % 7), 40 + 5 * (number % 5))).save(
                path, quality=90
            )
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"))


def source_of(root: Path, decode: str, split: int = 0, **more: object) -> FolderSource:
    source = datasets_of(
        ImageFolderConfig(root=str(root), image_size=SIZE, decode=decode, **more), 0
    )[split]
    assert isinstance(source, FolderSource)
    return source


def batches_of(source: FolderSource, micro_batches: list[MicroBatch], workers: int) -> Loader:
    tuning = TuningConfig(
        precision="fp32",
        num_workers=workers,
        pin_memory=False,
        non_blocking=False,
        channels_last=False,
    )
    return loader_of(source, micro_batches, tuning, "cpu")


# --- crops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (20, 30), (300, 40)])
@pytest.mark.parametrize("draws", DRAWS)
def test_crops_are_those_of_torchvision(
    shape: tuple[int, int], draws: tuple[float, ...] | None
) -> None:
    image = torch.from_numpy(picture(1, *shape)).permute(2, 0, 1)
    at = crop.crop_box_for(*shape, 64, draws)
    if draws is None:
        theirs = functional.center_crop(functional.resize(image, [73], antialias=True), [64, 64])
    else:
        theirs = functional.resized_crop(image, *at[:4], size=[64, 64], antialias=True)
    assert torch.equal(crop.resize_crop(image, at, 64), theirs)
    together = crop.resize_crops([image], [at], 64)[0].float()
    difference = (together - theirs.float()).abs()
    assert difference.mean() < 0.1 and difference.max() <= 3  # of 255


def test_hidden_folders_are_no_classes_and_empty_ones_are_named(tmp_path: Path) -> None:
    """Jupyter leaves .ipynb_checkpoints behind, with copies of what was open."""
    with pytest.raises(DataError, match=f"{tmp_path} holds no image"):
        FolderSource(tmp_path, 32, augmented=False, seed=0, decode="pil")
    for name in ("a", "b", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
        Image.fromarray(picture(0)).save(tmp_path / name / "one.jpg")
    shutil.copytree(tmp_path / "b", tmp_path / "a/.ipynb_checkpoints")
    found = FolderSource(tmp_path, 32, augmented=False, seed=0, decode="pil")
    assert found.classes == ["a", "b"] and len(found) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path}/empty holds no image"):
        FolderSource(tmp_path, 32, augmented=False, seed=0, decode="pil")


def test_a_crop_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in one bit, though sums run over other lengths."""
    images = [
        torch.from_numpy(picture(n, 30 + 37 * n, 210 - 23 * n)).permute(2, 0, 1) for n in range(8)
    ]
    windows = [
        crop.crop_box_for(*image.shape[1:], SIZE, DRAWS[n % 5]) for n, image in enumerate(images)
    ]
    together = crop.resize_crops(images, windows, SIZE)
    for n, image in enumerate(images):
        assert torch.equal(together[n], crop.resize_crops([image], [windows[n]], SIZE)[0])
    monkeypatch.setattr(crop, "MAX_PIXELS", 3 * 200 * 200)
    assert torch.equal(together, crop.resize_crops(images, windows, SIZE))


def test_pil_crops_as_torchvision_does_pil_images(folder: Path) -> None:
    for split, epoch in ((0, 3), (1, None)):
        source = source_of(folder, "pil", split)
        indices = np.arange(6)
        for crops, path, draws in zip(
            source.get_batch(indices, epoch)[0],
            source.paths,
            source.draws(indices, epoch),
            strict=False,
        ):
            image = Image.open(path)
            if draws is None:
                theirs = functional.center_crop(
                    functional.resize(image, [27], antialias=True), [SIZE, SIZE]
                )
            else:
                box = crop.random_crop(image.width, image.height, draws[:4])
                theirs = functional.resized_crop(image, *box, size=[SIZE, SIZE], antialias=True)
            assert torch.equal(crops, functional.pil_to_tensor(theirs))


def test_inputs_are_mirrored_by_draw_and_normalised(folder: Path) -> None:
    source = source_of(folder, "processes")
    indices = np.arange(12)
    crops, labels = source.get_batch(indices, 2)
    mirrored = torch.tensor(
        [draws is not None and draws[4] < 0.5 for draws in source.draws(indices, 2)]
    )
    assert 0 < mirrored.sum() < 12 and labels.tolist() == [0] * 12 and crops.dtype == torch.uint8
    expected = torch.where(mirrored[:, None, None, None], crops.flip(-1), crops).double() / 255
    expected = functional.normalize(expected, list(IMAGENET_MEAN), list(IMAGENET_STD))
    for dtype, layout in (
        (torch.float32, torch.channels_last),
        (torch.float64, torch.contiguous_format),
    ):
        inputs = source.finish(crops.contiguous(memory_format=layout), indices, 2, dtype)
        assert inputs.dtype == dtype and inputs.is_contiguous(memory_format=layout)
        torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=1e-6)


# --- every file -----------------------------------------------------------------------------------


def odd_files(root: Path) -> None:
    """Files that some decoders do not take, or take otherwise."""
    numbers = picture(5, 50, 64)
    image = Image.fromarray(numbers)
    shutil.rmtree(root / "train" / "a")
    place = root / "train" / "a"
    place.mkdir()
    image.convert("CMYK").save(place / "cmyk.jpg")
    image.convert("L").save(place / "grey.jpg")
    image.save(
        place / "exif.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"
    )  # its first directory lies outside
    image.save(place / "progressive.jpg", progressive=True)
    image.convert("P").save(place / "palette.png")
    image.convert("RGBA").save(place / "transparent.png")
    image.convert("LA").save(place / "grey_transparent.png")
    image.save(place / "a bitmap.bmp")
    image.save(place / "webp.webp")
    content = io.BytesIO()
    image.save(content, "PNG")
    (place / "png_in_truth.jpg").write_bytes(content.getvalue())


def test_odd_files_are_decoded_whatever_decodes(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder, tmp_path / "odd")
    odd_files(root)
    sources = {decode: source_of(root, decode) for decode in DECODERS}
    indices = np.arange(10)
    crops = {decode: source.get_batch(indices, 0)[0] for decode, source in sources.items()}
    gpu = sources["gpu"]
    crops["gpu"] = gpu.crops_on(torch.device("cpu"), gpu.read(indices), indices, 0)
    for decode in ("pil", "gpu"):
        difference = (crops[decode].float() - crops["processes"].float()).abs().flatten(1).mean(1)
        assert difference.max() < 1, (
            decode,
            dict(zip(sources["pil"].paths, difference.tolist(), strict=False)),
        )


SPOILT = {
    "truncated": lambda content: content[: len(content) // 2],
    "cut": lambda content: content[:-30],
    "garbage": lambda content: bytes(range(256)) * 4,
    "garbage behind a JPEG's start": lambda content: content[:3] + bytes(range(256)) * 4,
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("decode", DECODERS)
def test_a_spoilt_file_is_named_with_its_sample(decode: str, folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder, tmp_path / "spoilt")
    source = source_of(root, decode)
    path = Path(source.paths[7])
    micro_batches = evaluation_batches(20, 5, 0, 1)
    whole = path.read_bytes()
    for kind, spoil in SPOILT.items():
        path.write_bytes(spoil(whole))
        good, told, remedy = until_it_fails(source, micro_batches, 0)
        assert good == 5, "the batch before it is in order"
        assert told.startswith(f"{path} (sample 7) cannot be decoded: "), kind
        assert remedy == "repair or remove the file"
    path.unlink()
    assert f"{path} (sample 7)" in until_it_fails(source, micro_batches, 0)[1]


def until_it_fails(
    source: FolderSource, micro_batches: list[MicroBatch], workers: int
) -> tuple[int, str, str]:
    """How many samples a loader gave, what it then said, and the remedy."""
    good = 0
    try:
        for batch in batches_of(source, micro_batches, workers):
            good += len(batch.targets)
    except DataError as error:
        return good, str(error), error.remedy
    raise AssertionError("nothing was raised")


def failures_of_processes(world: World, root: Path) -> list[tuple[int, str, str]]:
    return [
        until_it_fails(source_of(root, decode), evaluation_batches(20, 5, 0, 1), 1)
        for decode in DECODERS[:2]
    ]


@pytest.mark.slow
def test_a_loader_process_names_a_spoilt_file(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder, tmp_path / "spoilt")
    path = Path(source_of(root, "pil").paths[7])
    path.write_bytes(path.read_bytes()[:-30])
    (found,) = on_ranks(
        1, failures_of_processes, root
    )  # its process ends at once, whatever it has started
    for good, told, remedy in found:
        assert (good, remedy) == (5, "repair or remove the file")
        assert told.startswith(f"{path} (sample 7) cannot be decoded: ")


def test_a_gpu_that_cannot_decode_is_a_mistake_in_the_config() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has one that can")
    with pytest.raises(ConfigError, match=r"data\.decode=gpu: .* use data\.decode=processes"):
        require_decoder(torch.device("cuda:0"))


# --- the same on any number of ranks and workers --------------------------------------------------


def tensors_by_sample(
    world: World, root: Path, workers: int
) -> dict[tuple[str, int | None, int], Tensor]:
    """What each sample of this rank becomes in two epochs, and in an evaluation (epoch None), with
    each decoder."""
    seen = {}
    for decode in DECODERS:
        train, test = (source_of(root, decode, split) for split in (0, 1))
        plan = BatchPlan(len(train), 12, 1, 6, 0, world.rank, world.size)
        loaders = (
            (train, list(plan.micro_batches())),
            (test, evaluation_batches(len(test), 2, world.rank, world.size)),
        )
        for source, micro_batches in loaders:
            for batch in batches_of(source, micro_batches, workers):
                for row, number in enumerate(
                    batch.micro_batch.indices[: batch.micro_batch.num_real].tolist()
                ):
                    seen[decode, batch.micro_batch.epoch, number] = batch.inputs[row].clone()
    return seen


@pytest.mark.slow
@pytest.mark.nightly
def test_sample_is_one_tensor_on_any_rank_worker_and_world(folder: Path) -> None:
    runs = []
    for ranks, workers in ((1, 0), (1, 3), (3, 1)):
        merged: dict[tuple[str, int | None, int], Tensor] = {}
        for part in on_ranks(ranks, tensors_by_sample, folder, workers):
            assert not merged.keys() & part.keys()
            merged |= part
        runs.append(merged)
    one = runs[0]
    assert len(one) == len(DECODERS) * (2 * 36 + 6)
    for other in runs[1:]:
        assert other.keys() == one.keys() and all(
            torch.equal(other[key], one[key]) for key in other
        )
    assert not torch.equal(one["processes", 0, 5], one["processes", 1, 5]), "epochs draw anew"


# --- threads of the GPU decoder ---------------------------------------------------------------------


def at_work() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("decode", "read"))
    ]


def test_threads_keep_order_and_bounds_and_end_with_the_loader(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(folder, "gpu")
    read_files = list[int]()
    micro_batches = evaluation_batches(36, 4, 0, 1)
    look = source.read_file
    monkeypatch.setattr(
        source, "read_file", lambda number: read_files.append(number) or look(number)
    )
    loader = batches_of(source, micro_batches, 3)
    for _ in range(2):
        assert [batch.micro_batch.indices.tolist() for batch in loader] == [
            micro_batch.indices.tolist() for micro_batch in micro_batches
        ]
    read_files.clear()
    batches = iter(loader)
    next(batches)
    assert at_work()
    time.sleep(0.3)
    assert max(read_files) < 4 * 3, "the batch that was asked for, and prefetch_factor=2 more"
    del batches
    deadline = time.monotonic() + 5
    while at_work() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not at_work()


def test_an_error_of_a_thread_reaches_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(folder, "gpu")

    def broken(number: int) -> np.ndarray:
        raise RuntimeError(f"broken sample {number}")

    monkeypatch.setattr(source, "read_file", broken)
    with pytest.raises(RuntimeError, match="broken sample 0"):
        list(batches_of(source, evaluation_batches(4, 4, 0, 1), 2))


# --- what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "decode", "workers"),
    [
        (Hardware(cpus=3), "processes", 1),  # over two processes
        (Hardware(16, gpus=1, compute_capability=(9, 0)), "processes", 16),
        (Hardware(128, gpus=8, compute_capability=(9, 0)), "processes", 16),
        (Hardware(32, gpus=8, compute_capability=(9, 0)), "gpu", 4),
    ],
)
def test_decoding_is_chosen_by_cores_per_gpu(machine: Hardware, decode: str, workers: int) -> None:
    config = resolve(config_asked(), machine, None)
    assert (config.data.decode, config.tuning.num_workers) == (decode, workers)


def config_asked():
    config = config_of(World(), data={"name": "image_folder"}, tuning={"num_workers": "auto"})
    config.data.decode = config.tuning.num_workers = config.device = (
        config.launch.nproc_per_node
    ) = "auto"
    return config


# --- whole runs -----------------------------------------------------------------------------------


def words(root: Path, *more: str) -> list[str]:
    """Three epochs of six steps on three ranks, two loader processes each, and one evaluation."""
    return [
        "model=mlp",
        "data=image_folder",
        f"data.root={root}",
        f"data.image_size={SIZE}",
        "data.decode=processes",
        "train.global_batch_size=6",
        "train.epochs=3",
        "train.evaluate_every_epochs=3",
        "checkpoint.every_steps=4",
        "checkpoint.keep=99",
        "tuning.num_workers=2",
        THREE,
        *more,
    ]


@pytest.mark.nightly
def test_run_with_loader_processes_resumes_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    whole = run(f"run_dir={tmp_path}/run", *words(folder))
    assert whole.returncode == 0, whole.stderr
    assert "decode processes" in whole.stdout
    expected = weights(tmp_path / "run")
    score = read(tmp_path / "run", "summary.json")["test"]
    for place in (tmp_path / "run" / "checkpoints").iterdir():
        if place.name > "step_00000008":  # as if the run had been lost in its second epoch
            shutil.rmtree(place)
    again = run(f"run_dir={tmp_path}/run", *words(folder, "tuning.num_workers=0"))
    assert again.returncode == 0 and "from step 8" in again.stdout, again.stderr
    assert weights(tmp_path / "run") == expected
    assert read(tmp_path / "run", "summary.json")["test"] == score


@pytest.mark.slow
def test_a_spoilt_file_of_rank_1_ends_the_run(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder, tmp_path / "spoilt")
    source = source_of(root, "processes")
    number = next(
        micro_batch
        for micro_batch in BatchPlan(36, 6, 1, 18, 0, 1, 3).micro_batches()
        if micro_batch.step == 3
    ).indices[0]
    path = Path(source.paths[number])
    path.write_bytes(path.read_bytes()[:200])
    done = run(f"run_dir={tmp_path}/run", *words(root))
    failure = read(tmp_path / "run", "failure.json")
    assert (done.returncode, failure["kind"], failure["rank"], failure["phase"]) == (
        65,
        "data",
        1,
        "data",
    )
    assert (
        f"{path} (sample {number}) cannot be decoded" in failure["detail"] and failure["step"] == 3
    )
    assert failure["remedy"] == "repair or remove the file"


def test_a_link_to_a_folder_around_it_brings_no_file_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        Image.fromarray(picture(0)).save(tmp_path / name / "one.png")
        Image.fromarray(picture(0)).save(tmp_path / name / "inner/two.PNG")
    (tmp_path / "a/inner/again").symlink_to(tmp_path / "a")
    (tmp_path / "a/inner/other").symlink_to(tmp_path / "b/inner")
    (tmp_path / "b/inner/back").symlink_to(tmp_path / "a/inner")
    found = FolderSource(tmp_path, 32, augmented=False, seed=0, decode="pil")
    names = [str(Path(path).relative_to(tmp_path)) for path in found.paths]
    assert names == [
        "a/one.png",
        "a/inner/two.PNG",
        "a/inner/other/two.PNG",
        "b/one.png",
        "b/inner/two.PNG",
        "b/inner/back/two.PNG",
        "b/inner/back/again/one.png",
    ]
    (tmp_path / "a/inner/again").unlink()
    (tmp_path / "b/inner/back").unlink()
    theirs = make_dataset(str(tmp_path), {"a": 0, "b": 1}, (".png",))
    found = FolderSource(tmp_path, 32, augmented=False, seed=0, decode="pil")
    assert list(zip(found.paths, found.targets.tolist(), strict=True)) == theirs
