"""What a trained model predicts for each sample, written in their order by any number of processes:
mode=predict."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.distributed.exchange import tensors_from_all_ranks
from ddp_train.distributed.process_group import ranks
from ddp_train.engine.loop import Evaluation
from ddp_train.errors import TaskError, WriteError
from ddp_train.tasks.task import Task, has_own_columns

Columns = Mapping[str, np.ndarray]
"""A row per sample in each."""
SAMPLE = "sample"
LABEL = "label"
FILE = "file"
CLASSES = "classes"
"""The number of a sample, the name of the class that is predicted, the sample's file; and the names
of all classes."""
RESERVED = (SAMPLE, LABEL, FILE, CLASSES)
ROWS_AT_ONCE = 4_096
"""Of a parquet file, held in memory together."""


@torch.no_grad()
def predict_batches(evaluation: Evaluation, batches: int, device: str) -> Iterator[Columns]:
    """The predictions for each batch of a data set, in the order of the batches. A collective:
    every process must use it up. batches: of all processes together; process r of p has the numbers
    r, r + p, r + 2 p ..."""
    evaluation.module.eval()
    own = iter(evaluation.batches)
    with evaluation.strategy.averaged(evaluation.module):
        for _ in range(-(-batches // ranks())):
            batch = next(own, None)
            found = {}
            if batch is not None:
                columns = evaluation.module.predictions(batch.data)
                found = checked_columns(columns, batch.micro_batch.num_real, evaluation.module.task)
            for names, columns in tensors_from_all_ranks(list(found), list(found.values()), device):
                if names:
                    yield {
                        name: column.cpu().numpy()
                        for name, column in zip(names, columns, strict=True)
                    }


def checked_columns(found: Any, rows: int, of: Task) -> dict[str, Tensor]:
    """What `Task.predictions` returned for a batch, a row per sample. Raises TaskError if it is
    something else."""
    task = f"predictions() of the task {type(of).__name__}"
    remedy = "return tensors with a row per sample: {'prediction': outputs.argmax(1)}"
    if not has_own_columns(of):
        task = f"the task {type(of).__name__} has no predictions(), and what its predict() gives"
        remedy = (
            "add predictions(model, batch), which may pad or sum up what differs in number, and"
            f" {remedy}"
        )
    if not isinstance(found, Mapping) or not found:
        raise TaskError(f"{task} returned a {type(found).__name__}", remedy)
    for name, value in found.items():
        if not isinstance(value, Tensor) or not value.ndim or len(value) != rows:
            if isinstance(value, Tensor):
                shape = f"a tensor {list(value.shape)}"
            else:
                shape = f"a {type(value).__name__}"
            raise TaskError(f"{task} returned {shape} as {name!r}, for {rows} samples", remedy)
        if not str(name).isidentifier() or name in RESERVED:
            raise TaskError(
                f"{task} returned a column {name!r}",
                f"use a plain name, and none of {', '.join(RESERVED)}",
            )
    return {
        name: value.float() if value.dtype == torch.bfloat16 else value
        for name, value in found.items()
    }


def labels_of(predictions: Any, classes: Sequence[str] | None) -> list[str] | None:
    """The name of each class that is predicted, [n]; None if they have no names, or if it is not
    one class a sample."""
    if (
        not classes
        or predictions is None
        or predictions.ndim != 1
        or np.asarray(predictions).dtype.kind != "i"
    ):
        return None
    return [
        classes[number] if 0 <= number < len(classes) else str(number)
        for number in map(int, predictions)
    ]


def write_predictions(
    rows: Iterator[Columns],
    path: Path,
    numbers: np.ndarray,
    files: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> dict[str, list[int]]:
    """Writes them to a file, whole or not at all. Returns each column's name with the shape of its
    rows.

    numbers: of the samples. files: of the samples, where each has one. classes: their names, if
    there are any. Raises TaskError and WriteError.
    """
    file = PredictionFile(path, len(numbers))
    with file.opened():
        file.add({SAMPLE: numbers})
        for columns in rows:
            file.add(columns)
        texts = {
            FILE: files,
            LABEL: labels_of(file.column("prediction"), classes),
            CLASSES: classes,
        }
        file.finish({name: np.array(text) for name, text in texts.items() if text is not None})
    shapes = {name: list(shape) for name, (_, shape) in file.forms.items()}
    return shapes | {name: [] for name in (FILE, LABEL) if texts[name] is not None}


class PredictionFile:
    """Columns written as they come. There is a file when all rows are in it; until then each column
    is a file without a name beside it: no column has to fit into memory. A process that is killed
    leaves nothing, or what it had put together by then, which the next one replaces."""

    def __init__(self, path: Path, samples: int) -> None:
        """path: its suffix is the format, .npz or .parquet. samples: rows that will come."""
        self.path = path
        self.samples = samples
        self.part = path.with_name(f".{path.name}.part")
        self.files: dict[str, IO[bytes]] = {}
        self.begins: dict[str, int] = {}
        self.forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Raises WriteError, with nothing left behind, if the disk does not take it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            remedy = "free space, or name another run_dir"
            raise WriteError(f"{self.path} cannot be written: {error.strerror}", remedy) from error
        finally:
            for close in (*(file.close for file in self.files.values()), self.part.unlink):
                with contextlib.suppress(
                    OSError
                ):  # its last bytes do not fit either; what matters was raised
                    close()

    def add(self, columns: Columns) -> None:
        """The next rows. Raises TaskError if a column is not of the shape that it began with."""
        for name, rows in columns.items():
            form = rows.dtype, rows.shape[1:]
            if name not in self.forms:
                self.forms[name] = form
                file = self.files[name] = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115  closed in `opened`
                header = {
                    "descr": rows.dtype.str,
                    "fortran_order": False,
                    "shape": (self.samples, *rows.shape[1:]),
                }
                np.lib.format.write_array_header_1_0(file, header)
                self.begins[name] = file.tell()
            if form != self.forms[name]:
                before = f"{list(self.forms[name][1])} of {self.forms[name][0]}"
                raise TaskError(
                    f"{name}: a row is {list(form[1])} of {form[0]} in one batch and {before} in"
                    " another",
                    "return rows of one shape for all samples, padded for instance",
                )
            self.files[name].write(np.ascontiguousarray(rows).tobytes())

    def column(self, name: str) -> np.ndarray | None:
        """What was added; None if there is no such column."""
        return self._held(name) if name in self.files else None

    def _held(self, name: str) -> np.ndarray:
        dtype, shape = self.forms[name]
        self.files[name].flush()
        return np.memmap(self.files[name], dtype, "r", self.begins[name], (self.samples, *shape))

    def finish(self, more: Mapping[str, np.ndarray]) -> None:
        """Makes the file, once all rows were added. more: columns of texts, and in .npz also what
        is no column."""
        texts = {name: values for name, values in more.items() if name != CLASSES}
        if self.path.suffix == ".npz":
            with zipfile.ZipFile(
                self.part, "w"
            ) as packed:  # without times: the same predictions are the same bytes
                for name, rows in self.files.items():
                    rows.seek(0)  # and what was written before is flushed
                    with packed.open(_member(name), "w", force_zip64=True) as file:
                        shutil.copyfileobj(rows, file)
                for name, values in more.items():
                    with packed.open(_member(name), "w") as file:
                        np.lib.format.write_array(file, values, allow_pickle=False)
        else:
            self._write_parquet(texts)
        self.part.replace(self.path)

    def _write_parquet(self, texts: Mapping[str, np.ndarray]) -> None:
        """Numbers as columns, [k] as lists, all in pieces."""
        import pyarrow
        from pyarrow import parquet

        held = {name: self._held(name) for name in self.files} | dict(texts)
        writer = None
        for first in range(0, self.samples, ROWS_AT_ONCE):
            rows = {name: column[first : first + ROWS_AT_ONCE] for name, column in held.items()}
            arrays = {
                name: pyarrow.array(list(part) if part.ndim > 1 else part)
                for name, part in _flat(rows).items()
            }
            table = pyarrow.table(arrays)
            writer = writer or parquet.ParquetWriter(self.part, table.schema)
            writer.write_table(table)
        if writer:
            writer.close()


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{name}.npy")


def _flat(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parquet's lists have one dimension: [n, h, w] becomes [n, h * w]."""
    return {
        name: part.reshape(len(part), -1) if part.ndim > 2 else part for name, part in rows.items()
    }
