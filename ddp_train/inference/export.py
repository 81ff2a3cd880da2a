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

BATCH_SIZES = (2, 5)
"""Sizes of the batches that are compared. The first is the example of the export; the other shows
that any size goes."""
TOLERANCE = 1e-4
"""Largest difference of an output, as a part of the largest output. Other kernels add up in another
order: 2e-6 for resnet18 through ONNX."""
FACTS = ("task", "classes", "image", "input_shape", "input_dtype", "outputs", "step")
"""Entries of a checkpoint's manifest that model.json has too."""
Program = Callable[[Tensor], Tensor]
"""An exported model, read again: inputs -> outputs."""


def export_model(
    model: nn.Module, manifest: dict[str, Any], folder: Path, formats: list[str]
) -> dict[str, Any]:
    """Write model.pt2, model.onnx and model.json; the batch may have any size in each.

    Returns for each format its file and the largest difference from the model's own outputs,
    relative to the largest output. Raises ConfigError if the model takes or returns no tensor,
    DataError if it cannot be exported or computes something else then, WriteError if the disk does
    not take it.
    """
    examples = [_example(manifest, model, size) for size in BATCH_SIZES]
    model.eval().requires_grad_(False)
    expected = [model(example) for example in examples]
    if not isinstance(expected[0], Tensor):
        kind = type(expected[0]).__name__
        rule = f"the model returns a {kind}, and only one tensor can be exported"
        remedy = "let its forward return one tensor in eval mode"
        raise ConfigError([f"mode=export: {rule}; {remedy}"])
    exports = {}
    parts = folder / ".export"
    try:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        for name in formats:
            export, file = FORMATS[name]
            program = export(model, examples[0], parts / file)
            outputs = [program(example) for example in examples]
            difference = _largest_difference(name, outputs, expected)
            exports[name] = {
                "file": str(folder / file),
                "largest_difference": difference,
                "takes": _takes(manifest),
            }
        facts = {name: manifest[name] for name in FACTS if name in manifest}
        (parts / "model.json").write_text(json.dumps(facts) + "\n")
        for part in parts.iterdir():  # ONNX has weights of more than 2 GiB in a file of their own
            part.replace(folder / part.name)
    except OSError as error:
        raise WriteError(
            f"{folder} cannot be written: {error.strerror}",
            "free some space, or use a new folder: run_dir=runs/new",
        ) from error
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return exports


def _takes(manifest: dict[str, Any]) -> str:
    """The inputs that an exported model takes: `any number of samples of 1 x 28 x 28`."""
    shape = " x ".join(map(str, manifest["input_shape"])) or "one number"
    if not getattr(torch, manifest["input_dtype"]).is_floating_point:
        return f"any number of samples of exactly {shape} tokens: pad or cut others"
    return f"any number of samples of {shape}"


def _example(manifest: dict[str, Any], model: nn.Module, size: int) -> Tensor:
    """A batch of random inputs of the kind that the model was trained with.

    Raises ConfigError and DataError.
    """
    if "input_shape" not in manifest:
        rule = "only models whose input is one tensor can be exported"
        remedy = (
            "if the input of your model is one tensor, let the data set return (input, target)"
            " instead of a dict, and train for one step"
        )
        problem = "mode=export: the samples of the data set do not begin with one input tensor"
        raise ConfigError([f"{problem}; {rule}; {remedy}"])
    generator = torch.Generator().manual_seed(hash_key(0, "export", size))
    shape = (size, *manifest["input_shape"])
    dtype = getattr(torch, manifest["input_dtype"])
    weight = next(model.parameters())
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)
    tokens = manifest.get("outputs", 2)  # as many as there are outputs
    return torch.randint(tokens, shape, generator=generator, dtype=dtype).to(weight.device)


def _largest_difference(name: str, outputs: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of all batches. Raises DataError if it is too large, or NaN."""
    largest = 0.0
    for output, own in zip(outputs, expected, strict=True):
        difference = _difference(output, own)
        if not difference <= TOLERANCE:  # NaN is not
            raise DataError(
                f"export.formats={name}: its outputs differ from the model's by {difference:.1g}"
                " times the largest output",
                f"leave {name} out of export.formats, or change the operation that differs",
            )
        largest = max(largest, difference)
    return largest


def _difference(output: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number that is expected."""
    if output.shape != expected.shape:
        return float("inf")
    expected = expected.cpu().double()
    largest = (output.detach().cpu().double() - expected).abs().max()
    return float(largest / expected.abs().max().clamp(min=1e-12))


def _export_torch(model: nn.Module, example: Tensor, file: Path) -> Program:
    """torch.export's program, for torch.export.load, AOTInductor and ExecuTorch."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = _exported(
        "torch", lambda: torch.export.export(model, (example,), dynamic_shapes=shapes)
    )
    torch.export.save(program, file)
    return torch.export.load(file).module()


def _export_onnx(model: nn.Module, example: Tensor, file: Path) -> Program:
    """ONNX, run by ONNX Runtime."""
    import onnxruntime

    def export() -> Any:
        return torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            verbose=False,
            input_names=["input"],
            output_names=["output"],
        )

    _exported("onnx", export).save(file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {"input": inputs.cpu().numpy()})[0])


def _exported(name: str, export: Callable[[], Any]) -> Any:
    """The result of an export by torch.

    Raises DataError with the first line of what torch says, which is long.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own internals
            return export()
    except Exception as error:  # torch's have no common class
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"export.formats={name}: the model cannot be exported: {reason}",
            "the log names the line. Rewrite code that depends on the values of tensors, such as"
            " `if x.sum() > 0`",
        ) from error


FORMATS: dict[str, tuple[Callable[[nn.Module, Tensor, Path], Program], str]] = {
    "torch": (_export_torch, "model.pt2"),
    "onnx": (_export_onnx, "model.onnx"),
}
"""For each format its export, and its file."""
