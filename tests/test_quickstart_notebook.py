"""examples/quickstart.ipynb: every cell runs, and the file has no outputs."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import NEEDS_RECIPES, ROOT, run_in_fork

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


def show_cells() -> None:
    """Run the code cells; print each cell's HTML as JSON and the text of its last expression, as Jupyter shows them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(read_notebook()):
        print("cell")
        tree = ast.parse(cell.source)
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = eval(compile(last, "<cell>", "eval"), namespace) if last is not None else None
        if value is not None:
            print("html", json.dumps(getattr(value, "_repr_html_", lambda: None)()))
            print(repr(value))


def check_cells(outputs: list[str], html: str) -> None:
    """Check the text of the five cells, and that the image of the first is shown as HTML."""
    generated, plan, explanation, placed, checked = outputs
    assert "<img" in html
    assert "seed 7" in generated
    assert "float32" in plan
    assert "StableDiffusionPipeline on mps with 8GiB" in explanation
    assert "StableDiffusionPipeline on neuron:0" in placed
    assert "(virtual)" in placed
    assert "neuron (virtual, placed): passes" in checked


@pytest.mark.long
@NEEDS_RECIPES
def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork. The slow test runs the cells in a Jupyter kernel."""
    monkeypatch.chdir(tmp_path)
    done = run_in_fork(show_cells, ["notebook"], {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    _, *outputs = done.stdout.split("cell\n")
    html = next(line for line in outputs[0].splitlines() if line.startswith("html "))
    check_cells(outputs, json.loads(html.removeprefix("html ")))


@pytest.mark.slow
@NEEDS_RECIPES
def test_every_cell_runs_in_jupyter(tmp_path: Path) -> None:
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

    cells = code_cells(notebook)
    check_cells([read_output(cell) for cell in cells], cells[0].outputs[-1].data["text/html"])
