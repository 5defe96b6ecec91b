"""Samples per second of loaders, side by side: python bench/data_loaders.py

Two processes each, as many workers a process as a case says. Contenders that are not installed are left out, with a
line that says so. A side is timed by itself in processes of its own, from its second batch to its last, in turns.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROUNDS, RANKS = 3, 2
CASES = {"tensors": (400_000, 256, 0), "memmap": (60_000, 256, 0), "parquet": (60_000, 256, 2), "pngs": (1_500, 50, 1)}
WIDTH = 2048  # floats of a sample of the memmap: half a gigabyte in all


def prepare(folder: Path) -> None:
    count = CASES["memmap"][0]
    data = np.memmap(folder / "data.bin", dtype=np.float32, mode="w+", shape=(count, WIDTH))
    data[:] = np.arange(count, dtype=np.float32)[:, None]
    data.flush()
    from PIL import Image

    random = np.random.default_rng(0)
    for part in range(10):
        with tarfile.open(folder / f"{part}.tar", "w") as tar:
            for index in range(CASES["pngs"][0] // 10):
                file = io.BytesIO()
                pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8).repeat(14, 0).repeat(14, 1)
                Image.fromarray(pixels).save(file, "png")
                about = tarfile.TarInfo(f"{part:02}_{index:05}.png")
                about.size = file.tell()
                file.seek(0)
                tar.addfile(about, file)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    count = CASES["parquet"][0]
    for part in range(8):
        values = np.arange(part, count, 8)
        table = pyarrow.table({"x": values, "y": values % 10, "z": values * 0.5})
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=1000)


def decoded(data: bytes) -> torch.Tensor:
    """An image, flipped or not, cropped, as floats."""
    from PIL import Image

    image = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)
    top, left = torch.randint(0, 32, (2,)).tolist()
    image = image[:, top : top + 192, left : left + 192].float() / 255
    return image.flip(-1) if torch.rand(()) < 0.5 else image


class Pngs(torch.utils.data.Dataset):
    """The images of the tar files by index, as a map-style dataset has them."""

    def __init__(self, folder: Path):
        self.where = []
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                self.where += [(str(path), member.offset_data, member.size) for member in tar.getmembers()]

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, index: int) -> torch.Tensor:
        path, offset, size = self.where[index]
        with open(path, "rb") as file:
            file.seek(offset)
            return decoded(file.read(size))


class Rows(torch.utils.data.Dataset):
    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.data[index])) if isinstance(self.data, np.ndarray) else self.data[index]


def source(case: str, folder: Path) -> Any:
    if case == "tensors":
        return torch.arange(CASES[case][0] * 16.0).reshape(-1, 16)
    if case == "memmap":
        return np.memmap(folder / "data.bin", dtype=np.float32, mode="r", shape=(CASES[case][0], WIDTH))
    return Pngs(folder)


def row(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([sample["x"], sample["y"], sample["z"]])


def timed(batches: Any, count: Any = len) -> tuple[int, float]:
    """Samples and seconds, from the second batch to the last."""
    iterator = iter(batches)
    next(iterator)
    began, samples = time.perf_counter(), 0
    for batch in iterator:
        samples += count(batch)
    return samples, time.perf_counter() - began


def ours(case: str, folder: Path) -> tuple[int, float]:
    from spmd import Loader, Mesh, Stream

    _, batch, workers = CASES[case]
    with Mesh({"data": RANKS}) as mesh:
        if case == "parquet":
            dataset: Any = Stream.parquet(sorted(folder.glob("*.parquet"))).shuffle(1000).map(row)
        else:
            dataset = source(case, folder)
        loader = Loader(dataset, batch * RANKS, mesh=mesh, workers=workers, shards=8 if case == "parquet" else None)
        found = timed(loader)
        mesh.run(lambda: None)
        return found


def torchs(case: str, folder: Path) -> tuple[int, float]:
    from torch.utils.data import DataLoader, DistributedSampler

    rank, (_, batch, workers) = int(os.environ["RANK"]), CASES[case]
    torch.set_num_threads(1)
    dataset = Rows(source(case, folder)) if case in ("tensors", "memmap") else source(case, folder)
    sampler = DistributedSampler(dataset, RANKS, rank)
    return timed(DataLoader(dataset, batch, sampler=sampler, num_workers=workers))


class Arrays:
    """A dataset's samples as Grain takes them."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.asarray(self.data[index])


def grains(case: str, folder: Path) -> tuple[int, float]:
    import grain

    rank, (_, batch, workers) = int(os.environ["RANK"]), CASES[case]
    torch.set_num_threads(1)
    stream = grain.MapDataset.source(Arrays(source(case, folder))).shuffle(seed=0)[rank::RANKS].to_iter_dataset()
    stream = stream.batch(batch)
    if workers:
        stream = stream.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return timed(stream)


def datasets_(case: str, folder: Path) -> tuple[int, float]:
    import datasets
    from torch.utils.data import DataLoader

    rank, (_, batch, workers) = int(os.environ["RANK"]), CASES[case]
    torch.set_num_threads(1)
    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder))
    stream = datasets.distributed.split_dataset_by_node(stream.shuffle(0, buffer_size=1000), rank, RANKS).map(
        lambda sample: {"row": row(sample)}
    )
    return timed(DataLoader(stream, batch, num_workers=workers), lambda found: len(found["x"]))


SIDES = {"ours": ours, "torch": torchs, "grain": grains, "datasets": datasets_}
_ALL = ("ours", "torch", "grain")
WHO = {"tensors": _ALL, "memmap": _ALL, "parquet": ("ours", "datasets"), "pngs": _ALL}


def run(side: str, case: str, folder: Path) -> float:
    """Samples a second of all processes of a side together."""
    command = [sys.executable, __file__, side, case, str(folder)]
    count = 1 if side == "ours" else RANKS
    environs = [{**os.environ, "RANK": str(rank), "HF_HUB_OFFLINE": "1"} for rank in range(count)]
    started = [subprocess.Popen(command, env=each, stdout=subprocess.PIPE, text=True) for each in environs]
    found = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in started]
    return sum(samples for samples, _ in found) / max(seconds for _, seconds in found)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        print(f"samples a second, medians of {ROUNDS}; {RANKS} processes, {os.cpu_count()} cores, {torch.__version__}")
        print(f"{'case':10} {'side':10} {'workers':8} {'samples/s':>12}   lowest, highest")
        for case, (_, _, workers) in CASES.items():
            rates: dict[str, list[float]] = {side: [] for side in WHO[case]}
            for _ in range(ROUNDS):
                for side, found in rates.items():
                    try:
                        found.append(run(side, case, folder))
                    except Exception as error:
                        print(f"{case:10} {side:10} left out: {type(error).__name__}: {str(error)[:60]}")
            for side, found in rates.items():
                if found:
                    low, middle, high = min(found), sorted(found)[len(found) // 2], max(found)
                    print(f"{case:10} {side:10} {workers:<8} {middle:12.0f}   {low:.0f}, {high:.0f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(SIDES[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))))
    else:
        main()
