"""The picture of the digits demo: how the loss fell, and which rank took which sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from spmd import Sampler

STEPS, POSITIONS = 8, 16  # as much of the first minibatches as can be made out
FINE = 8  # pixels of the picture for one of a sample, so that resampling leaves its edges sharp


def deal(sampler: Sampler, size: int, step: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The ids of one minibatch, and for each position in it the rank that took it."""
    ids = np.asarray(sampler.batch(epoch, step))
    owner = np.full(len(ids), -1)
    for rank in range(size):
        owner[np.isin(ids, np.asarray(sampler.shard(epoch, step, rank, size)))] = rank
    return ids, owner


def mosaic(sampler: Sampler, size: int, images: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """The first samples of the first minibatches as one RGB image: a row per step, each sample in its rank's colour."""
    images = np.pad(images / images.max(), [(0, 0), (1, 1), (1, 1)])
    height, width = images.shape[1] + 2, images.shape[2] + 2
    rows, columns = min(STEPS, len(sampler)), min(POSITIONS, sampler.batch_size)
    picture = np.ones((rows * height, columns * width, 3))
    for row in range(rows):
        ids, owner = deal(sampler, size, row)
        for column, (sample, rank) in enumerate(zip(ids[:columns], owner, strict=False)):
            # White strokes on the rank's colour, with a white edge around.
            ink = images[sample][:, :, None]
            top, left = row * height + 1, column * width + 1
            picture[top : top + height - 2, left : left + width - 2] = ink + (1 - ink) * colours[rank]
    return picture.repeat(FINE, 0).repeat(FINE, 1)


def draw(path: Path, losses: list[float], sampler: Sampler, size: int, images: np.ndarray) -> None:
    """Write the picture to `path`.

    Args:
        path: where to; the suffix gives the format.
        losses: one per step, from the first on.
        sampler: the one that dealt out the training samples.
        size: the number of ranks.
        images: the training samples in the order of their ids, [length, height, width].
    """
    figure = Figure(figsize=(13.5, 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: nothing global, and no display needed
    curve, deals = figure.subplots(1, 2, width_ratios=(1, 1.9))

    curve.semilogy(np.arange(1, len(losses) + 1), losses, color="0.75", linewidth=0.8, label="of each step")
    epochs = [slice(start, start + len(sampler)) for start in range(0, len(losses), len(sampler))]
    middles = [np.mean(np.arange(1, len(losses) + 1)[epoch]) for epoch in epochs]
    means = [np.mean(losses[epoch]) for epoch in epochs]
    curve.semilogy(middles, means, color="black", marker="o", markersize=3.5, label="mean of each epoch")
    curve.set(title="training loss", xlabel="step", ylabel="cross entropy", xlim=(0, len(losses) + 1))
    curve.grid(color="0.93")
    curve.set_axisbelow(True)
    curve.legend()

    colours = 0.7 * matplotlib.colormaps["turbo"](np.linspace(0.1, 0.9, size))[:, :3]  # dark enough for white
    picture = mosaic(sampler, size, images, colours)
    columns, rows = min(POSITIONS, sampler.batch_size), min(STEPS, len(sampler))
    deals.imshow(picture, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), interpolation="antialiased")
    deals.set_xticks(range(columns))
    deals.set_yticks(range(rows))
    deals.tick_params(length=0)
    deals.spines[:].set_visible(False)
    deals.set(
        title="the first minibatches: which rank took which sample", xlabel="position in the minibatch", ylabel="step"
    )
    shown = np.unique(np.linspace(0, size - 1, min(size, 8)).round().astype(int))
    patches = [Patch(color=colours[rank], label=f"rank {rank}") for rank in shown]
    deals.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=120)
