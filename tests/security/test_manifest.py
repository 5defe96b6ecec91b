"""Checkpoints from a disk that others write to: whatever is in one, it is read as it was saved or refused in words."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import manifest as manifests
import optree
import pytest
import torch

from spmd import Loader, P, Sampler, SpmdError, put, restore, save

MUTATIONS = 2000
# What an edit may put in the place of anything.
STRANGE = [
    None, True, False, 0, 1, 2, -1, 2**31, 2**63, 2**64 + 1, -(2**70), 10**400, 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "leaf", "float64", "float32", "int64", "bool", "Tensor", "data", "..", ".", "../../etc/passwd",
    "/etc/passwd", "/dev/zero", "checkpoint.json", "rank-00001.safetensors", "rank-00000.safetensors", "a\0b", "\ud800",
    [], [0], [1, 1], [-1], [None], [[2]], [[]], ["data"], {}, {"x": 1}, {"tensor": True}, {"list": []}, [2**62, 2**62],
]  # fmt: skip


def tree(mesh: Any) -> dict[str, Any]:
    return {
        "cut": put(torch.arange(24.0).reshape(4, 6), P("data"), mesh=mesh),
        "other": put(torch.arange(24).reshape(6, 4).t(), P(None, "data"), mesh=mesh),
        "whole": [torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 7, torch.tensor(3)],
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "z": torch.complex(torch.ones(2), torch.zeros(2)),
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
        "empty": torch.ones(0, 3),
        "flags": torch.tensor([True, False]),
        "numbers": (1, 2.5, True, None, "text"),
        "loader": Loader(torch.arange(10), 4),
        "sampler": Sampler(10, 4, seed=2),
    }


@pytest.fixture(scope="module")
def saved(shared_mesh: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    return save(tmp_path_factory.mktemp("runs"), tree(shared_mesh({"data": 2}))).result()


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / saved.name)


def places(node: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*path, key))


def at(node: Any, path: tuple) -> Any:
    for key in path:
        node = node[key]
    return node


def mutated(manifest: Any, draw: random.Random) -> tuple[Any, tuple]:
    """A manifest with one edit that knows its structure, and where that is."""
    manifest = copy.deepcopy(manifest)
    path = draw.choice([path for path in places(manifest) if path])
    parent, key = at(manifest, path[:-1]), path[-1]
    value = parent[key]
    how = draw.choice(["replace", "replace", "remove", "double", "swap", "add", "near", "elsewhere"])
    if how == "replace":
        parent[key] = draw.choice(STRANGE)
    elif how == "remove":
        del parent[key]
    elif how == "double" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    elif how == "swap" and len(parent) > 1:
        other = draw.choice([one for one in (parent if isinstance(parent, dict) else range(len(parent))) if one != key])
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "add":
        (value if isinstance(value, dict) else parent if isinstance(parent, dict) else {})["more"] = draw.choice(
            STRANGE
        )
    elif how == "near" and isinstance(value, int) and not isinstance(value, bool):
        parent[key] = value + draw.choice([-1, 1, 2, -(2**40), 2**40])
    elif how == "near" and isinstance(value, str):
        parent[key] = draw.choice([value + "x", value[:-1], f"./{value}", f"../{value}", value.upper(), f"{value}\n"])
    else:
        parent[key] = copy.deepcopy(at(manifest, draw.choice(list(places(manifest)))))
    return manifest, path


def refused(folder: Path) -> Any:
    """What restores, or None if it is refused in the checkpoint's own words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another fingerprint
        try:
            return restore(folder)
        except SpmdError as error:
            assert (str(folder) in str(error) and ".json" in str(error)) or ".safetensors" in str(error), error
            return None


def same_tensors(got: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        same = isinstance(got, torch.Tensor) and got.dtype is expected.dtype
        return same and torch.equal(got, expected)
    if isinstance(expected, dict | list | tuple):
        pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
        return (
            type(got) is type(expected) and len(got) == len(expected) and all(same_tensors(got[k], v) for k, v in pairs)
        )
    return True


def plain(tree: Any) -> str:
    """What is no tensor."""
    return repr(optree.tree_map(lambda leaf: "tensor" if isinstance(leaf, torch.Tensor) else leaf, tree))


def is_free(manifest: Any, path: tuple) -> bool:
    """Whether an edit changed what is as good as what was there: a number that was saved, the run's own numbers."""
    if path[0] in ("step", "fingerprint", "position"):
        return True
    own = ("value", "loader", "deals", "sampler", "strides", "frozen", "trainable", "spec")
    return path[0] == "leaves" and len(path) > 2 and path[2] in own


def test_edits_of_a_manifest(folder: Path) -> None:
    """Each with a checksum that fits it: what is read has the tensors that were saved, or it is refused."""
    original, draw, accepted = manifests.read(folder.parent), random.Random(0), 0
    expected = restore(folder)
    for number in range(MUTATIONS):
        manifest, path = mutated(original, draw)
        manifests.seal(folder, manifest)
        back = refused(folder)
        if back is None:
            continue
        accepted += 1
        if json.dumps(manifest, sort_keys=True) != json.dumps(original, sort_keys=True):
            others = is_free(original, path) or plain(back) == plain(expected)  # such as the order of pieces
            assert others, (number, path, at(original, path))
            assert same_tensors(back, expected), (number, path)
    assert 0 < accepted < MUTATIONS // 2
    manifests.seal(folder, original)
    assert same_tensors(restore(folder), expected)


def test_edits_without_a_checksum(folder: Path) -> None:
    """What is not JSON, and what is and has another checksum."""
    file, draw = folder / "checkpoint.json", random.Random(1)
    sealed = json.loads(file.read_text())
    data = file.read_bytes()
    for _ in range(200):
        manifest, _ = mutated(sealed["manifest"], draw)
        if manifest != sealed["manifest"]:
            file.write_text(json.dumps({**sealed, "manifest": manifest}))
            assert refused(folder) is None
    for text in (
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b"1" * 10_000,
        b"null",
        b"[]",
        b'{"a": 1}',
        data[:-1],
        data * 2,
    ):
        file.write_bytes(text)
        assert refused(folder) is None


def resealed(folder: Path, name: str, data: bytes) -> None:
    """A file of tensors, and a manifest that says that it is as it was written."""
    import hashlib

    (folder / name).write_bytes(data)
    manifest = manifests.read(folder.parent)
    for about in manifest["files"]:
        if about["file"] == name:
            about.pop("sums", None)  # as in format 2
            about.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifests.seal(folder, manifest)


def test_edits_of_a_file_of_tensors(folder: Path) -> None:
    """Truncated, or with another header, and a manifest whose checksums fit."""
    name, draw = "rank-00000.safetensors", random.Random(2)
    data = (folder / name).read_bytes()
    expected, length = restore(folder), int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for _ in range(300):
        new, _ = mutated(header, draw)
        text = json.dumps(new).encode()
        resealed(folder, name, len(text).to_bytes(8, "little") + text + data[8 + length :])
        back = refused(folder)
        assert back is None or (new == header) or same_tensors(back, expected)
    for cut in (0, 1, 7, 8, 9, 8 + length, len(data) - 1):
        resealed(folder, name, data[:cut])
        assert refused(folder) is None
    for first in (0, 2**40, 2**63, 2**64 - 1):
        resealed(folder, name, first.to_bytes(8, "little") + data[8:])
        assert refused(folder) is None
    resealed(folder, name, data + b"\0")
    assert refused(folder) is None


@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "folder", "device"])
def test_what_is_no_plain_file(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    """It is not followed, and not waited for: by restore, nor by a save that looks which checkpoints are whole."""
    shutil.move(folder / name, tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        target = {"link": tmp_path / "elsewhere", "dangling link": "nowhere", "device": "/dev/zero"}[kind]
        (folder / name).symlink_to(target)
    with pytest.raises(SpmdError, match=f"{folder / name}"):
        restore(folder)
    save(tmp_path, {"w": 1}, step=7, keep=1)
    assert restore(tmp_path) == {"w": 1} and not folder.exists()


def test_names_that_lead_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Copies of a file of the checkpoint's, whose checksums fit."""
    original, name = manifests.read(folder.parent), "rank-00000.safetensors"
    shutil.copy(folder / name, tmp_path / name)
    (folder / "sub").mkdir()
    shutil.copy(folder / name, folder / "sub" / name)
    for other in (f"../{name}", str(tmp_path / name), f"sub/{name}", f"./{name}", f"{name}\n", f"{name}/.", ""):
        manifest = json.loads(json.dumps(original).replace(json.dumps(name), json.dumps(other)))
        manifests.seal(folder, manifest)
        with pytest.raises(SpmdError, match=r"checkpoint\.json is damaged: files\[0\]\.file .*a file's name within"):
            restore(folder)


# -- afterwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["overwritten", "truncated", "removed"])
def test_what_was_restored_has_memory_of_its_own(tmp_path: Path, how: str) -> None:
    value = torch.arange(100_000.0)
    folder = save(tmp_path, {"w": value, "odd": torch.ones(3), "turned": value.reshape(100, 1000).t()}).result()
    back, file = restore(tmp_path), folder / "rank-00000.safetensors"
    if how == "overwritten":
        with open(file, "r+b") as opened:
            opened.write(b"\xff" * file.stat().st_size)
    elif how == "truncated":
        os.truncate(file, 0)  # a mapping of it would end the process
    else:
        shutil.rmtree(folder)
    assert torch.equal(back["w"], value) and back["odd"].tolist() == [1, 1, 1]
    assert torch.equal(back["turned"], value.reshape(100, 1000).t())
    back["w"].add_(1)
    assert back["w"].data_ptr() % 16 == 0 and back["w"].untyped_storage().nbytes() == value.numel() * 4


def test_written_to_after_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of a file and the reading of its tensors."""
    folder = save(tmp_path, {"w": torch.ones(5000)}).result()
    file, read = folder / "rank-00000.safetensors", os.preadv

    def late(*args: Any) -> int:
        data = file.read_bytes()
        with open(file, "r+b") as opened:
            opened.write(data[:-4] + b"\0\0\0\0")
        return read(*args)

    monkeypatch.setattr(os, "preadv", late)
    with pytest.raises(SpmdError, match=rf"{file} is damaged: w"):
        restore(tmp_path)


def test_a_manifest_that_is_longer_than_memory(folder: Path) -> None:
    os.truncate(folder / "checkpoint.json", 1 << 40)  # the disk has nothing of it
    with pytest.raises(SpmdError, match=r"checkpoint\.json is damaged: the file .expected at most"):
        restore(folder)


def test_steps_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(SpmdError, match="bad step"):
        save(tmp_path, {"x": 1}, step=2**62)
    save(tmp_path, {"x": 1}, step=3).result()
    (tmp_path / f"step-{2**62}").mkdir()
    save(tmp_path, {"x": 2}, step=4, keep=1).result()
    assert restore(tmp_path) == {"x": 2}
