"""examples/quickstart.ipynb: every cell runs, and the file has no outputs."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import NEEDS_RECIPES, ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def read_notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read_output(cell: Any) -> str:
    """Return the text output of a cell."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        texts.append(output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts)


def test_the_notebook_is_valid_and_is_stored_without_outputs() -> None:
    notebook = read_notebook()
    nbformat.validate(notebook)
    assert [cell.outputs for cell in code_cells(notebook)] == [[]] * 5
    assert {cell.execution_count for cell in code_cells(notebook)} == {None}


@pytest.mark.long
@NEEDS_RECIPES
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    # The tests run torch in one thread, but a user's kernel does not.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    notebook = read_notebook()
    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute(env=environment)

    generated, plan, explanation, placed, checked = code_cells(notebook)
    assert "text/html" in generated.outputs[-1].data
    assert "seed 7" in read_output(generated)
    assert "float32" in read_output(plan)
    assert "StableDiffusionPipeline on mps with 8GiB" in read_output(explanation)
    assert "StableDiffusionPipeline on neuron:0" in read_output(placed)
    assert "(virtual)" in read_output(placed)
    assert "neuron (virtual, placed): passes" in read_output(checked)
