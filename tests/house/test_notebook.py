"""notebooks/quickstart.ipynb runs from top to bottom, on a machine without GPUs, and shows what it
promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from nbformat.v4 import new_code_cell

from tests.support.commands import ROOT

NOTEBOOK = ROOT / "notebooks/quickstart.ipynb"
SMALL = ["data.limit=100", "train.epochs=2"]

FORKED = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support import zygote

class Forked(zygote.Command):
    def __init__(self, words, **options):
        whole = [zygote.SCRIPT if word == "launch.py" else word for word in words]
        super().__init__(whole, **options)

zygote.start()
subprocess.Popen = Forked
"""
"""The commands of the notebook, and their runs, are forked; the kernel itself is a real one."""


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert all(
        not cell.outputs and cell.execution_count is None
        for cell in cells
        if cell.cell_type == "code"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    tagged = [
        place
        for place, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    study = [*SMALL, "study.repeats=1", "study.only=[none,recommended]"]
    small = (
        f"RUNS, JOB, STUDY = {str(tmp_path)!r}, {[*SMALL, 'launch.nproc_per_node=1']!r}, {study!r}"
    )
    notebook.cells[tagged[0] + 1 : tagged[0] + 1] = [new_code_cell(small), new_code_cell(FORKED)]
    nbclient.NotebookClient(
        notebook, timeout=250, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    for folder in (tmp_path / "digits", *(tmp_path / "tips/trials").glob("*/0")):
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    shown = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    table = next(data["text/markdown"] for data in shown if "text/markdown" in data)
    for variant in ("none", "recommended"):
        assert re.search(rf"^\| {variant} \|.*\| completed \|", table, re.M), table
    assert any("image/png" in data for data in shown), "the curve of the default job"
    assert any(data.get("text/html", "").startswith("<iframe srcdoc=") for data in shown), (
        "the page of the study"
    )
