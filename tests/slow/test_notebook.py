"""The notebook runs as it stands, and shows what its text says."""

import os
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from tests.documentation import copy_examples
from tests.integration.test_documentation import environment


def test_the_notebook_trains_compares_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy_examples(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "examples/notebook/first_run.ipynb"
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3")
    client.execute(cwd=str(file.parent))

    weak, strong = (
        pd.read_json(run / "metrics.jsonl", lines=True)
        for run in sorted((tmp_path / "runs").glob("notebook-kl-*"))
    )
    start = weak["eval/initial_score_mean"].iloc[0]
    assert weak["eval/score_mean"].iloc[-1] > start + 0.05
    assert weak["kl/ref_response_mean"].iloc[-1] > strong["kl/ref_response_mean"].iloc[-1]
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = "".join(output.get("text", "") for output in shown)
    assert "raypo: notebook-kl-" in texts
    assert (tmp_path / "runs/notebook.html").exists()
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert shown[-1]["data"]["text/plain"].strip("'").startswith("9174=")
    assert os.listdir(tmp_path / "runs/notebook-policy")
