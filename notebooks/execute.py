"""Run the notebooks through a kernel and keep what they show: `python execute.py` for all, or with their names.

What only a live front end can draw (a progress bar's widget), and what differs between runs for no reason (times of
day), is left out, so that the files stay small and show on any page.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path: Path, timeout: float = 500.0) -> nbformat.NotebookNode:
    """The notebook with what its cells show when run one after the other; raises what one of them raises."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # else a text is in as many pieces as time has cut it
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    notebook.metadata.pop("widgets", None)
    return notebook


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        began = time.perf_counter()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.perf_counter() - began:.1f} s, {path.stat().st_size / 1024:.0f} KiB")
