"""What a checkpoint says of itself, checked field by field before anything of it is used.

A manifest comes from a disk: another program, another version or a clumsy hand may have written it. Invariant: a
manifest that passes is as `save` writes it, names only files within the folder, and claims nothing that the files do
not have.

    {"sha256": ..., "manifest": {
        "format": 3, "step": 120,
        "files":  [{"file": "rank-00000.safetensors", "bytes": 832, "sums": ...}, ...],   "sha256" in format 2
        "tree":   {"dict": ["w"], "of": ["leaf"]},                       the structure, without the leaves
        "leaves": [{"key": "w", "path": "['w']", "tensor": true, "dtype": "float32", "shape": [4, 3],
                    "spec": ["data"], "parts": [[2]]}, ...],             in the order of the structure
        "pieces": {"w": [[0, "rank-00000.safetensors", "w"], [1, "rank-00001.safetensors", "w"]]},
        "fingerprint": {...}, "position": [12, 0],                       of the run; see `fingerprint`
        "ranks": 2}}                                                     the most that the mesh has had
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..kernels.errors import SpecError
from ..mesh import strides
from ..transforms import Sampler
from . import schema
from .schema import Check, Invalid
from .tensor_file import CODES, Stored

FORMAT, READ = 3, (2, 3)  # what is written, and what can be read
MANIFEST = "checkpoint.json"
RANK_FILE = re.compile(r"rank-\d{5,9}\.safetensors", re.ASCII)
DEEPEST = 100  # levels of a tree


def seal(manifest: Mapping[str, Any]) -> bytes:
    """A manifest with its checksum."""
    text = json.dumps(manifest).encode()
    return b'{"sha256": "%s", "manifest": %s}' % (hashlib.sha256(text).hexdigest().encode(), text)


def unsealed(data: bytes) -> tuple[dict[str, Any], str]:
    """A manifest that is well-formed, and its checksum.

    Raises:
        Invalid: it is not.
    """
    try:
        sealed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Invalid("the whole", str(error), "JSON") from None
    schema.fields("the whole", sealed, {"sha256": schema.sha256, "manifest": schema.anything})
    manifest = sealed["manifest"]
    try:
        digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    except (ValueError, RecursionError) as error:
        raise Invalid("manifest", str(error), "what JSON can say") from None
    schema.require(digest == sealed["sha256"], "sha256", sealed["sha256"], digest)
    check(manifest)
    return manifest, digest


def check(manifest: Any) -> None:
    """Compare a manifest with what `save` writes, as far as it can be without the files.

    Raises:
        Invalid: it differs.
    """
    schema.require(isinstance(manifest, dict), "manifest", manifest, "an object")
    number = manifest.get("format")
    schema.require(type(number) is int and number in READ, "it has another format", number, str(FORMAT))
    required = {"format": schema.whole, "step": schema.whole, "files": schema.list_of(_file), "pieces": _pieces}
    required |= {"tree": schema.anything, "leaves": schema.list_of(_leaf), "fingerprint": _fingerprint}
    schema.fields("", manifest, required, {"position": _position, "ranks": schema.whole})
    files = [about["file"] for about in manifest["files"]]
    schema.require(0 < len(files) == len({*files}), "files", files, "one or more, each once")
    paths = list(named_leaves(manifest["tree"]))
    leaves = manifest["leaves"]
    schema.require(len(paths) == len(leaves), "leaves", f"{len(leaves)} of them", f"{len(paths)}, as tree has")
    for index, (leaf, named) in enumerate(zip(leaves, paths, strict=True)):
        got = leaf["path"], leaf["key"]
        schema.require(got == named, f"leaves[{index}].path and key", got, f"{named}, as tree has")
    tensors = [leaf["key"] for leaf in leaves if "tensor" in leaf]
    schema.require({*tensors} == {*manifest["pieces"]}, "pieces", [*manifest["pieces"]], "the keys of tensors")
    used: set[tuple[str, str]] = set()
    for leaf in leaves:
        if "tensor" in leaf:
            _check_positions(leaf, manifest["pieces"][leaf["key"]], files, used)


def _check_positions(leaf: Mapping[str, Any], pieces: list[Any], files: list[str], used: set[tuple[str, str]]) -> None:
    """Every part of a value is there once."""
    field = f"pieces[{leaf['key']!r}]"
    for _, file, name in pieces:
        schema.require(file in files, field, file, "one of files")
        schema.require(name == leaf["key"], field, name, leaf["key"])
        schema.require((file, name) not in used, field, (file, name), "each tensor of a file once")
        used.add((file, name))
    parts = [math.prod(sizes) for sizes in leaf.get("parts", [])]
    schema.require(len(pieces) == math.prod(parts), field, f"{len(pieces)} pieces", str(math.prod(parts)))
    numbers = sorted(numbers_of(position) for position, _, _ in pieces)
    expected = [*itertools.product(*map(range, parts))] if parts else [(0,)]
    schema.require(numbers == expected, field, numbers, f"each of {parts or 1} parts once")


def numbers_of(position: int | list[int]) -> tuple[int, ...]:
    """A piece's number in every dimension that was cut."""
    return (position,) if isinstance(position, int) else tuple(position)


def check_files(manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, Stored]]) -> None:
    """Compare a manifest with the tensors that the files have, by name.

    Raises:
        Invalid: a piece differs from what its leaf says, or is missing, or one is there that the manifest has not.
    """
    seen = {file: {*tensors} for file, tensors in files.items()}
    for leaf in manifest["leaves"]:
        if "tensor" not in leaf:
            continue
        field = f"pieces[{leaf['key']!r}]"
        dim, pairs = len(leaf["shape"]), (2,) if leaf["dtype"].startswith("complex") else ()
        extents: list[dict[int, int]] = [{} for _ in leaf["shape"]]
        for position, file, name in manifest["pieces"][leaf["key"]]:
            schema.require(name in files[file], field, f"no tensor {name} in {file}", "one")
            code, shape = files[file][name].code, files[file][name].shape
            seen[file].discard(name)
            schema.require(code == CODES[leaf["dtype"]], field, f"{code} in {file}", f"{leaf['dtype']}")
            good = len(shape) == dim + len(pairs) and shape[dim:] == pairs
            schema.require(good, field, f"shape {list(shape)} in {file}", f"a part of {leaf['shape']}")
            numbers = (*numbers_of(position), *[0] * dim)  # a scalar has none that counts
            for size, number, known in zip(shape[:dim], numbers[:dim], extents, strict=True):
                good = known.setdefault(number, size) == size
                schema.require(good, field, f"shape {list(shape)} in {file}", "parts that fit together")
        whole = [sum(known.values()) for known in extents]
        schema.require(whole == leaf["shape"], field, f"parts of {whole}", f"{leaf['shape']}")
    for file, names in seen.items():
        schema.require(not names, f"pieces in {file}", sorted(names), "no tensors but those of leaves")


# -- the structure ----------------------------------------------------------------------------------------------------


def named_leaves(structure: Any) -> Iterator[tuple[str, str]]:
    """(path, key) of every leaf of a structure: `['layers'][0]`, and `layers.0` as in a state dictionary, each once.

    >>> list(named_leaves({"dict": ["w", "b"], "of": ["leaf", {"list": ["leaf"]}]}))
    [("['w']", 'w'), ("['b'][0]", 'b.0')]

    Raises:
        Invalid: it is no structure.
    """
    keys: set[str] = set()
    for number, (path, names) in enumerate(_walk(structure, "", ())):
        key = name = ".".join(names) or "value"
        while key in keys or key == "__metadata__":  # which means something else in a file of safetensors
            key, number = f"{name}#{number}", number + 1
        keys.add(key)
        yield path, key


def _walk(node: Any, path: str, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    field = f"tree{path}"
    if node == "leaf":
        yield path, names
        return
    fits = isinstance(node, dict) and len(names) < DEEPEST
    schema.require(fits, field, node, f"a structure of at most {DEEPEST} levels")
    below: list[tuple[str, str]]
    if "dict" in node:
        schema.fields(field, node, {"dict": schema.list_of(_dict_key), "of": _anythings}, {"class": _dict_class})
        children, below = node["of"], [(f"[{key!r}]", str(key)) for key in node["dict"]]
        schema.require(len({*node["dict"]}) == len(below), field, node["dict"], "each key once")
    elif "class" in node:
        schema.fields(field, node, {"class": schema.text, "at": schema.list_of(schema.text), "of": _anythings})
        children, below = node["of"], [(piece, piece.strip(".[]'\"")) for piece in node["at"]]
        schema.require(len({*node["at"]}) == len(below), field, node["at"], "each place once")
    else:
        kind = "list" if "list" in node else "tuple"
        schema.fields(field, node, {kind: _anythings})
        children, below = node[kind], [(f"[{index}]", str(index)) for index in range(len(node[kind]))]
    schema.require(len(children) == len(below), field, f"{len(children)} children", str(len(below)))
    for child, (piece, name) in zip(children, below, strict=True):
        yield from _walk(child, path + piece, (*names, name))


_anythings = schema.list_of(schema.anything)
_dict_class = schema.one_of("OrderedDict", "defaultdict")

# -- fields ---------------------------------------------------------------------------------------------------------


def _dict_key(field: str, value: Any) -> None:
    (schema.text if isinstance(value, str) else schema.number)(field, value)


def _file(field: str, value: Any) -> None:
    def name(field: str, value: Any) -> None:
        fits = isinstance(value, str) and RANK_FILE.fullmatch(value) is not None
        schema.require(fits, field, value, "a file's name within the folder, rank-00000.safetensors")

    checksum = "sha256" if isinstance(value, dict) and "sha256" in value else "sums"
    schema.fields(field, value, {"file": name, "bytes": schema.whole, checksum: schema.sha256})


def _piece(field: str, value: Any) -> None:
    schema.require(isinstance(value, list) and len(value) == 3, field, value, "[place, file, name]")
    position, file, name = value
    (schema.list_of(schema.whole) if isinstance(position, list) else schema.whole)(f"{field}[0]", position)
    schema.text(f"{field}[1]", file)
    schema.text(f"{field}[2]", name)


_pieces = schema.mapping_of(schema.list_of(_piece))


def _leaf(field: str, value: Any) -> None:
    schema.require(isinstance(value, dict), field, value, "an object")
    named: dict[str, Check] = {"key": schema.text, "path": schema.text}
    if "tensor" in value:
        _tensor(field, value, named)
    elif "loader" in value:
        schema.fields(field, value, {**named, "loader": _position_in_data, "deals": _deals})
        if "stream" in value["deals"]:
            return
        length, step = len(Sampler(**_sampled(value["deals"]))), value["loader"]["step"]
        schema.require(step <= length, f"{field}.loader.step", step, f"at most {length}")
    elif "sampler" in value:
        schema.fields(field, value, {**named, "sampler": _sampler})
    else:
        schema.fields(field, value, {**named, "value": schema.plain})


def _tensor(field: str, value: Any, named: dict[str, Check]) -> None:
    sizes = schema.list_of(schema.whole)
    kind = {"tensor": schema.one_of(True), "dtype": schema.one_of(*CODES)}
    required = {**named, **kind, "shape": sizes, "spec": schema.list_of(_axes)}
    more = {"parts": schema.list_of(sizes), "strides": sizes, "frozen": schema.one_of(True)}
    schema.fields(field, value, required, {**more, "trainable": schema.one_of("parameter", "tensor")})
    shape, spec, parts = value["shape"], value["spec"], value.get("parts", [])
    fits = math.prod(max(size, 1) for size in shape) < schema.LARGEST >> 4
    schema.require(fits, f"{field}.shape", shape, "a size that memory has addresses for")
    axes = [[] if entry is None else [entry] if isinstance(entry, str) else entry for entry in spec]
    flat = [name for entry in axes for name in entry]
    schema.require(len(axes) <= len(shape) and len({*flat}) == len(flat), f"{field}.spec", spec, "axes, each once")
    fits = [*map(len, parts)] == [*map(len, axes)] and all(size > 0 for sizes in parts for size in sizes)
    fits = fits and math.prod(map(math.prod, parts)) < 1 << 30
    schema.require(fits, f"{field}.parts", parts, "the sizes of the axes in spec")
    if (layout := value.get("strides")) is not None:
        fits = len(layout) == len(shape) and strides.dense(shape, layout) == tuple(layout)
        schema.require(fits, f"{field}.strides", layout, "those of a tensor of its shape without gaps")
    trained = getattr(torch, value["dtype"])
    fits = "trainable" not in value or ("frozen" not in value and (trained.is_floating_point or trained.is_complex))
    schema.require(fits, f"{field}.trainable", value.get("trainable"), "nothing, of what cannot be trained")


def _axes(field: str, value: Any) -> None:
    if value is not None:
        (schema.list_of(schema.text) if isinstance(value, list) else schema.text)(field, value)


def _position_in_data(field: str, value: Any) -> None:
    schema.fields(field, value, {"epoch": schema.whole, "step": schema.whole}, {"streams": schema.text})


_SAMPLED: dict[str, Check] = {
    **dict.fromkeys(("length", "batch_size", "seed"), schema.number),
    **dict.fromkeys(("shuffle", "drop_last"), schema.flag),
    "order": schema.text,
}


def _deals(field: str, value: Any) -> None:
    """A sampler's arguments, and what else batches depend on, which is only compared."""
    schema.mapping_of(schema.plain)(field, value)
    if "stream" in value:
        return
    schema.require({*_SAMPLED} <= {*value}, field, [*value], f"the fields {', '.join(_SAMPLED)}")
    _sampler(field, _sampled(value))


def _sampled(deals: Mapping[str, Any]) -> dict[str, Any]:
    return {name: deals[name] for name in _SAMPLED}


def _sampler(field: str, value: Any) -> None:
    schema.fields(field, value, _SAMPLED)
    _make_sampler(field, value)


def _make_sampler(field: str, arguments: dict[str, Any]) -> None:
    try:
        Sampler(**arguments)
    except SpecError as error:
        raise Invalid(field, arguments, f"arguments of a Sampler ({error})") from None


_steps = schema.mapping_of(schema.list_of(schema.mapping_of(schema.plain)))


def _fingerprint(field: str, value: Any) -> None:
    known = {"torch": schema.text, "CPU capability": schema.text}
    more = {"seed": schema.number, "threads": schema.whole, "backend class": schema.text}
    schema.fields(field, value, known, {**more, "steps": _steps})


def _position(field: str, value: Any) -> None:
    fits = isinstance(value, list) and len(value) == 2
    schema.require(fits, field, value, "two numbers of calls")
    for number in value:
        schema.whole(field, number)


def parts_of(leaf: Mapping[str, Any]) -> Sequence[int]:
    """Into how many parts each dimension of a tensor was cut; empty if none was."""
    return [math.prod(sizes) for sizes in leaf.get("parts", [])]
