"""Metrics of torchmetrics whose state is summed over ranks and batches, beside one process with all samples."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torchmetrics
from torchmetrics import classification

from spmd import Loader, data_parallel, evaluate, psum, spmd

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CLASSES, SAMPLES = 4, 23  # in batches of 6 over 2 or 3 ranks: some are uneven, the last is short

METRICS: dict[str, Any] = {
    "accuracy": lambda: classification.MulticlassAccuracy(CLASSES, average="macro"),
    "F1": lambda: classification.MulticlassF1Score(CLASSES, average="macro"),
    "confusion": lambda: classification.MulticlassConfusionMatrix(CLASSES),
    "AUROC": lambda: classification.MulticlassAUROC(CLASSES, thresholds=20),
    "exact match": lambda: classification.MulticlassExactMatch(CLASSES, multidim_average="global"),
    "squared error": lambda: torchmetrics.MeanSquaredError(),
}


def samples(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "squared error":
        return {"out": torch.randn(SAMPLES, generator=generator), "y": torch.randn(SAMPLES, generator=generator)}
    if name == "exact match":
        shape = (SAMPLES, 2)
        labels = [torch.randint(CLASSES, shape, generator=generator) for _ in range(2)]
        return {"out": torch.where(torch.rand(shape, generator=generator) < 0.8, labels[1], labels[0]), "y": labels[1]}
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    return {"out": logits.softmax(1), "y": torch.randint(CLASSES, (SAMPLES,), generator=generator)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_states_are_the_metric_of_all_samples(ranks: int, real_mesh: Any) -> None:
    mesh = real_mesh(ranks)
    for name, make in METRICS.items():
        data, metric = samples(name), make()

        @spmd(mesh=mesh)
        @data_parallel
        def states(batch: Any, metric: Any = metric) -> Any:
            part = metric.clone()
            part.update(batch["out"], batch["y"])
            return psum(part.metric_state, "data")

        totals = evaluate(states, Loader(data, batch_size=6, mesh=mesh))
        for state, total in totals.items():
            setattr(metric, state, total)
        metric._update_count = 1
        expected = make()
        expected.update(data["out"], data["y"])
        torch.testing.assert_close(metric.compute(), expected.compute(), check_dtype=False, msg=name)


@pytest.mark.parametrize("kind", ["one", "several", "forward"])
def test_an_update_of_a_captured_metric_gives_a_warning(kind: str, real_mesh: Any) -> None:
    metric = METRICS["accuracy"]()
    metric = torchmetrics.MetricCollection([metric]) if kind == "several" else metric
    data = samples("accuracy")

    @spmd(mesh=real_mesh(2))
    @data_parallel
    def step(batch: Any) -> Any:
        (metric if kind == "forward" else metric.update)(batch["out"], batch["y"])
        return psum(batch["out"].sum(), "data")

    words = r"step changes what it captures.*an update of metric[.\w]*\): make its state in"
    with pytest.warns(UserWarning, match=words):
        step(data).item()


def test_the_block_of_the_page_runs(real_mesh: Any, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    block, output = re.search(
        r"```py\n(import torch\nimport torchmetrics.*?)```\n\n```text\n(.*?)```", page, re.DOTALL
    ).groups()
    exec(block.replace('mesh = Mesh({"data": 2})', ""), {"mesh": real_mesh(2), "__name__": "page"})
    assert capsys.readouterr().out == output
