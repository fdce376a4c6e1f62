"""The notebook is kept without outputs, and runs from its first cell to its last.

It trains two small models, which takes a minute or more, so it is run only when asked for:

    TRANSFORMER_JAX_NOTEBOOK=1 python3 -m pytest -m slow tests/test_inspect_notebook.py
"""

import ast
import json
import os
import pathlib
import time

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks" / "hello.ipynb"
MINUTES = 5


def cells(kind: str) -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_it_is_kept_without_outputs():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells("code"))


def test_its_code_is_python_and_imports_what_there_is():
    code = "\n".join("".join(cell["source"]) for cell in cells("code")).replace("%matplotlib inline", "")
    pytest.importorskip("matplotlib", reason="the notebook needs the extra `notebook`")
    imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, type_ignores=[]), str(NOTEBOOK), "exec"), {})


def test_it_has_a_section_for_each_of_the_twelve_steps():
    titles = [line for cell in cells("markdown") for line in "".join(cell["source"]).splitlines() if line[:3] == "## "]
    assert [title.split()[1] for title in titles if title[3].isdigit()] == [f"{number}." for number in range(1, 13)]


@pytest.mark.slow
@pytest.mark.skipif("TRANSFORMER_JAX_NOTEBOOK" not in os.environ, reason="set TRANSFORMER_JAX_NOTEBOOK=1 to run it")
@pytest.mark.filterwarnings("default")  # of the Jupyter client, not of the library
def test_it_runs_in_less_than_five_minutes_and_translates():
    nbclient = pytest.importorskip("nbclient", reason="the notebook needs the extra `notebook`")
    nbformat = pytest.importorskip("nbformat", reason="the notebook needs the extra `notebook`")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = time.perf_counter()
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=60 * MINUTES, kernel_name="python3", resources=where).execute()
    assert time.perf_counter() - start < 60 * MINUTES
    printed = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert "nicht, weil das Tier zu müde war" in printed
    assert "nicht, weil die Straße zu breit war" in printed
    assert "False" not in printed.replace("same weights: False", "")
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 14
