"""The block of docs/data.md that needs torchmetrics, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS


def test_metrics_of_torchmetrics_add_up_over_ranks(tmp_path):
    pytest.importorskip("torchmetrics")
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "block.py").write_text(blocks[-1])
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
