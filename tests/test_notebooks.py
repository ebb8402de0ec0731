"""The notebooks in examples/ run, and their widgets work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NAMES = ["torch", "jax", "interactive"]

CLICK = """
def click(figure, trace, point, x=0):
    figure._js2py_pointsCallback = {
        "event_type": "plotly_click",
        "points": {"trace_indexes": [trace], "point_indexes": [point], "xs": [x], "ys": [0]},
        "device_state": dict.fromkeys(["alt", "ctrl", "meta", "shift"], False)
        | {"button": 0, "buttons": 1},
        "selector": None,
    }

click(overview.figure, 0, [2, 40])
layer = overview.figure.layout.meta["layers"][2]
assert overview.detail.layout.meta["names"] == [layer], overview.detail.layout.meta
assert overview.detail.layout.meta["step"] == 40
click(histograms.loss, len(histograms.loss.data) - 1, 25, x=25)
assert histograms.figure.layout.meta["step"] == 25
click(lines.loss, len(lines.loss.data) - 1, 30, x=30)
assert [shape.x0 for shape in lines.figure.layout.shapes] == [30]
lines.kinds.value = "Activation"
assert lines.figure.layout.meta["kind"] == "Activation"
"""


def execute(names, folder, monkeypatch, *more):
    """Run notebooks in one kernel: its start and the import of torch take longer than they do."""
    read = [nbformat.read(FOLDER / f"{name}.ipynb", as_version=4) for name in names]
    notebook = read[0]
    notebook.cells += [cell for other in read[1:] for cell in other.cells]
    notebook.cells += [nbformat.v4.new_code_cell(code) for code in more]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = NotebookClient(
        notebook, timeout=110, kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute()
    return notebook


def shown(notebook, kind):
    """How many outputs of a kind there are."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    return sum(kind in output.get("data", {}) for output in outputs)


FIGURE = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "figures", "widgets"), [(["torch", "interactive"], 6, 3), (["jax"], 4, 0)]
)
def test_notebooks_show_figures_and_widgets(names, figures, widgets, tmp_path, monkeypatch):
    notebook = execute(names, tmp_path, monkeypatch, *[CLICK] * bool(widgets))
    assert (shown(notebook, FIGURE), shown(notebook, WIDGET)) == (figures, widgets)
    assert shown(notebook, "text/html") >= figures  # an exported notebook shows them, too
    assert json.dumps(notebook).count("src/version.js") <= 1  # one copy of plotly
    if "torch" in names:
        assert {"loss.html", "report.html", "runs"} <= set(os.listdir(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stored_without_outputs(name):
    content = json.loads((FOLDER / f"{name}.ipynb").read_text())
    for cell in content["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    said = "".join("".join(cell["source"]) for cell in content["cells"])
    assert "VS Code" in said
    assert "Colab" in said
