"""Predictions for each sample, written in their order by any number of processes: mode=predict."""

from __future__ import annotations

import contextlib
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
from ddp_train.distributed.training_step import scored
from ddp_train.engine.loop import Evaluation
from ddp_train.errors import TaskError, WriteError
from ddp_train.tasks.task import Task, has_own_columns
from ddp_train.text import with_article

Columns = Mapping[str, np.ndarray]
"""Columns by their names, each with a row per sample."""
SAMPLE = "sample"
"""Column: the number of the sample."""
LABEL = "label"
"""Column: the name of the class that is predicted."""
FILE = "file"
"""Column: the sample's file."""
CLASSES = "classes"
"""Entry of a .npz file: the names of all classes."""
RESERVED = (SAMPLE, LABEL, FILE, CLASSES)
ROWS_AT_ONCE = 4_096
"""Rows of a parquet file that are held in memory together."""


@torch.no_grad()
def predict_batches(evaluation: Evaluation, batch_count: int, device: str) -> Iterator[Columns]:
    """The predictions for each batch of a data set, in the order of the batches.

    A collective: every process must use it up.

    batch_count: number of batches of all processes together. Process r of p has the batches r,
        r + p, r + 2 p ...
    """
    module = evaluation.module
    module.eval()
    batches = iter(evaluation.batches)
    with evaluation.strategy.averaged(module):
        for _ in range(-(-batch_count // ranks())):
            batch = next(batches, None)
            columns = {}
            if batch is not None:
                with scored(batch.micro_batch):
                    predictions = module.predictions(batch.data)
                columns = checked_columns(predictions, batch.micro_batch.num_real, module.task)
            gathered = tensors_from_all_ranks(list(columns), list(columns.values()), device)
            for names, tensors in gathered:
                if names:
                    arrays = [tensor.cpu().numpy() for tensor in tensors]
                    yield dict(zip(names, arrays, strict=True))


def checked_columns(predictions: Any, rows: int, task: Task) -> dict[str, Tensor]:
    """Columns that `Task.predictions` returned for a batch; bfloat16 becomes float32.

    Raises TaskError if they have not a row per sample.
    """
    task_name = type(task).__name__
    source = f"predictions() of the task {task_name}"
    remedy = "return tensors with a row per sample: {'prediction': outputs.argmax(1)}"
    if not has_own_columns(task):
        source = f"the task {type(task).__name__} has no predictions(), and its predict()"
        remedy = f"add a method predictions(model, batch) to the task, and {remedy}"
    if not isinstance(predictions, Mapping) or not predictions:
        raise TaskError(f"{source} returned a {type(predictions).__name__}", remedy)
    columns = {}
    for name, value in predictions.items():
        if not isinstance(value, Tensor) or not value.ndim or len(value) != rows:
            kind = with_article(type(value).__name__)
            if isinstance(value, Tensor):
                kind = f"a tensor {list(value.shape)}"
            raise TaskError(f"{source} returned {kind} as {name!r}, for {rows} samples", remedy)
        if not str(name).isidentifier() or name in RESERVED:
            raise TaskError(
                f"{source} returned a column {name!r}",
                "use a name that begins with a letter, contains only letters, digits and _, and is"
                f" none of {', '.join(RESERVED)}",
            )
        columns[name] = value.float() if value.dtype == torch.bfloat16 else value
    return columns


def labels_of(predictions: Any, classes: Sequence[str] | None) -> list[str] | None:
    """The name of each class that is predicted, [n].

    None if they have no names, or if it is not one class a sample.
    """
    if not classes or predictions is None:
        return None
    if predictions.ndim != 1 or np.asarray(predictions).dtype.kind != "i":
        return None
    labels = []
    for number in map(int, predictions):
        has_name = 0 <= number < len(classes)
        labels.append(classes[number] if has_name else str(number))
    return labels


def write_predictions(
    batches: Iterator[Columns],
    path: Path,
    numbers: np.ndarray,
    files: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> dict[str, list[int]]:
    """Write predictions to a file, whole or not at all.

    path: its suffix is the format, .npz or .parquet.
    numbers: those of the samples.
    files: those of the samples, where each has one.
    classes: their names, if there are any.

    Returns each column's name with the shape of its rows. Raises TaskError and WriteError.
    """
    part = path.with_name(f".{path.name}.part")
    spool = ColumnSpool(path.parent, len(numbers))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spool.add({SAMPLE: numbers})
        for columns in batches:
            spool.add(columns)
        columns = spool.columns()
        texts = {FILE: files, LABEL: labels_of(columns.get("prediction"), classes)}
        columns |= {name: np.array(text) for name, text in texts.items() if text is not None}
        if path.suffix == ".parquet":
            _write_parquet(part, columns)
        else:
            further = {CLASSES: np.array(classes)} if classes else {}
            _write_npz(part, {**columns, **further})
        part.replace(path)
    except OSError as error:
        remedy = "free some space, or use a new folder: run_dir=runs/new"
        raise WriteError(f"{path} cannot be written: {error.strerror}", remedy) from error
    finally:
        spool.close()
        with contextlib.suppress(OSError):
            part.unlink()
    return {name: list(column.shape[1:]) for name, column in columns.items()}


class ColumnSpool:
    """Columns that come a few rows at a time, each in a file without a name.

    None has to fit into memory, and a process that is killed leaves nothing.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        """
        folder: on the disk that takes the files.
        samples: number of rows that will come.
        """
        self.folder = folder
        self.samples = samples
        self.files: dict[str, IO[bytes]] = {}
        self.row_types: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}

    def add(self, columns: Columns) -> None:
        """Append rows. Raises TaskError if a column is not of the shape that it began with."""
        for name, rows in columns.items():
            row_type = (rows.dtype, rows.shape[1:])
            if name not in self.files:
                self.row_types[name] = row_type
                self.files[name] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  see close
            if row_type != self.row_types[name]:
                dtype, shape = self.row_types[name]
                remedy = "return one type in the task's predictions()"
                if shape != rows.shape[1:]:
                    remedy = "pad them in the task's predictions(), or give inputs of one size"
                raise TaskError(
                    f"predictions: column {name!r} has rows of {list(shape)} {dtype} in one batch"
                    f" and of {list(rows.shape[1:])} {rows.dtype} in another, but a file needs one"
                    " shape and type",
                    remedy,
                )
            self.files[name].write(np.ascontiguousarray(rows).tobytes())

    def columns(self) -> dict[str, np.ndarray]:
        """All columns, once all rows were added; on the disk still."""
        columns: dict[str, np.ndarray] = {}
        for name, file in self.files.items():
            file.flush()
            dtype, shape = self.row_types[name]
            columns[name] = np.memmap(file, dtype, "r+", shape=(self.samples, *shape))
        return columns

    def close(self) -> None:
        for file in self.files.values():
            # On a full disk its last bytes do not fit either; what matters was raised.
            with contextlib.suppress(OSError):
                file.close()


def _write_npz(path: Path, columns: Columns) -> None:
    """As numpy.savez, which takes no column of the name `file`.

    There are no times in it: the same predictions are the same bytes.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, column, allow_pickle=False)


def _write_parquet(path: Path, columns: Columns) -> None:
    """Numbers as columns, [k] as lists, in pieces."""
    from pyarrow import parquet

    tables = _tables(columns)
    first = next(tables)
    with parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _tables(columns: Columns) -> Iterator[Any]:
    """Arrow tables of the next rows of all columns. [h, w] becomes a list of h * w numbers."""
    import pyarrow

    for first in range(0, len(columns[SAMPLE]), ROWS_AT_ONCE):
        arrays = {}
        for name, column in columns.items():
            rows = column[first : first + ROWS_AT_ONCE]
            if rows.ndim > 1:
                rows = list(rows.reshape(len(rows), -1))
            arrays[name] = pyarrow.array(rows)
        yield pyarrow.table(arrays)
