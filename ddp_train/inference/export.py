"""A trained model in other forms, each compared with the model before it counts: mode=export."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.data.rng import hash_key
from ddp_train.errors import ConfigError, DataError, WriteError
from ddp_train.text import first_line

BATCHES = (2, 5)
"""Sizes of the batches that are compared: the first is the example of the export, so the other
shows that any size goes."""
TOLERANCE = 1e-4
"""Largest difference of an output, as a part of the largest output. Other kernels add up in another
order: 2e-6 for resnet18 through ONNX."""
FACTS = ("task", "classes", "image", "input_shape", "input_dtype", "outputs", "step")
"""What model.json takes from a checkpoint's manifest."""


def export_model(
    model: nn.Module, manifest: dict[str, Any], folder: Path, formats: list[str]
) -> dict[str, Any]:
    """Writes model.pt2, model.onnx and model.json. Returns for each format its file and the largest
    difference from the model's own outputs, relative to the largest output.

    The batch may have any size in each. Raises ConfigError if the model takes no tensor, DataError
    if it cannot be exported or computes something else then, WriteError if the disk does not take
    it.
    """
    examples = [_example(manifest, model, size) for size in BATCHES]
    model.eval().requires_grad_(False)
    expected = [model(example) for example in examples]
    if not all(isinstance(one, Tensor) for one in expected):
        kind = type(expected[0]).__name__
        raise ConfigError(
            [
                f"mode=export: the model returns a {kind}; only one that returns a tensor can be"
                " exported"
            ]
        )
    written = {}
    parts = folder / ".export"
    try:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        for name in formats:
            write, file = FORMATS[name]
            run = write(model, examples[0], parts / file)
            differences = [
                _difference(run(example), own)
                for example, own in zip(examples, expected, strict=True)
            ]
            if not all(one <= TOLERANCE for one in differences):  # NaN is not
                raise DataError(
                    f"export.formats={name}: outputs differ from the model's by"
                    f" {max(differences):.1g} of the largest",
                    "export another format, or change the operation that differs",
                )
            written[name] = {"file": str(folder / file), "largest_difference": max(differences)}
        facts = {name: manifest[name] for name in FACTS if name in manifest}
        (parts / "model.json").write_text(json.dumps(facts) + "\n")
        for part in parts.iterdir():  # ONNX has weights of more than 2 GiB in a file of their own
            part.replace(folder / part.name)
    except OSError as error:
        raise WriteError(
            f"{folder} cannot be written: {error.strerror}", "free space, or name another run_dir"
        ) from error
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return written


def _example(manifest: dict[str, Any], model: nn.Module, size: int) -> Tensor:
    """A batch of inputs as the model was trained with, of random numbers. Raises ConfigError and
    DataError."""
    if "input_shape" not in manifest:
        rule = "only models whose input is one tensor can be exported"
        remedy = (
            "if yours is one, let the data set return (input, ...) instead of a dict, and train it"
            " for one step"
        )
        raise ConfigError(
            [
                f"mode=export: a sample of the data does not begin with the model's input; {rule};"
                f" {remedy}"
            ]
        )
    if "input_dtype" not in manifest:
        raise DataError(
            "the checkpoint does not say what its model takes", "resume its run for one step"
        )
    generator = torch.Generator().manual_seed(hash_key(0, "export", size))
    shape = (size, *manifest["input_shape"])
    dtype = getattr(torch, manifest["input_dtype"])
    own = next(model.parameters())
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(own.device, own.dtype)
    largest = manifest.get("outputs", 2)  # tokens: as many as there are outputs
    return torch.randint(largest, shape, generator=generator, dtype=dtype).to(own.device)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a part of the largest number that is expected."""
    if found.shape != expected.shape:
        return float("inf")
    expected = expected.detach().cpu().double()
    return float(
        (found.detach().cpu().double() - expected).abs().max()
        / expected.abs().max().clamp(min=1e-12)
    )


Run = Callable[[Tensor], Tensor]
"""What was written, read again: inputs -> outputs."""


def _torch_export(model: nn.Module, example: Tensor, file: Path) -> Run:
    """torch.export's program, for torch.export.load, AOTInductor and ExecuTorch."""
    batch = torch.export.Dim("batch", min=1)
    program = _exported(
        "torch", lambda: torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    )
    torch.export.save(program, file)
    return torch.export.load(file).module()


def _onnx(model: nn.Module, example: Tensor, file: Path) -> Run:
    """ONNX, run by ONNX Runtime."""
    import onnxruntime

    def exported() -> Any:
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        return torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            dynamic_shapes=shapes,
            verbose=False,
            input_names=["input"],
            output_names=["output"],
        )

    _exported("onnx", exported).save(file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {"input": inputs.cpu().numpy()})[0])


def _exported(name: str, export: Callable[[], Any]) -> Any:
    """Raises DataError with the first line of what torch says, which is long."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own internals
            return export()
    except Exception as error:  # torch's have no common class
        why = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"export.formats={name}: the model cannot be exported: {why}",
            "see the log; what depends on the values of tensors has to be written another way",
        ) from error


FORMATS: dict[str, tuple[Callable[[nn.Module, Tensor, Path], Run], str]] = {
    "torch": (_torch_export, "model.pt2"),
    "onnx": (_onnx, "model.onnx"),
}
"""For each format what writes it, and its file."""
