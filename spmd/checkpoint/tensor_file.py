"""Files of safetensors: what their headers may say, and where their tensors are.

A header comes from a disk, like a manifest. Invariant: the tensors that it names lie one behind the other and fill the
file, each as long as its dtype and shape make it.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..kernels.errors import dtype_name
from ..kernels.flat import as_bytes
from . import schema
from .direct import DirectFile
from .schema import Invalid

# What a file calls a dtype. Complex numbers are written as pairs.
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex128": "F64",
    "complex64": "F32",
    "complex32": "F16",
}
_DTYPES = {code: getattr(torch, name) for name, code in CODES.items() if not name.startswith("complex")}
_LENGTH = 8  # bytes of the number that a file begins with
_LONGEST_HEADER = 100_000_000  # bytes, the safetensors format says


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its bytes, and a checksum that tells whether they are still those that were checked."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.code]


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a file of these tensors, force it to disk, and return what a manifest says of it.

    Raises:
        OSError: what the file system says, with the file's name.
    """
    header, end = {}, 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that each is aligned
    for name, tensor in ordered:
        code = CODES[dtype_name(tensor.dtype)]
        offsets = [end, end := end + tensor.numel() * tensor.element_size()]
        header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    with DirectFile(file) as out:
        out.write(torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH, "little") + text), dtype=torch.uint8))
        for _, tensor in ordered:
            if tensor.numel():
                out.write(as_bytes(tensor))
        return out.finish()


def header_length(first: bytes, size: int) -> int:
    """How long the header is, of a file of this size that begins with these bytes.

    Raises:
        Invalid: it would end after the file.
    """
    length = int.from_bytes(first, "little")
    fits = len(first) == _LENGTH and _LENGTH + length <= size
    schema.require(fits, "the header's length", length, f"at most {size - _LENGTH}")
    schema.require(length <= _LONGEST_HEADER, "the header's length", length, f"at most {_LONGEST_HEADER}")
    return length


def stored(header: bytes, size: int) -> dict[str, Stored]:
    """The tensors that a header names, in the order in which they lie in a file of this size.

    Raises:
        Invalid: it is no header of such a file.
    """
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise Invalid("the header", str(error), "JSON") from None
    schema.require(isinstance(tensors, dict), "the header", tensors, "an object")
    tensors.pop("__metadata__", None)
    for name, about in tensors.items():
        known = {"dtype": schema.one_of(*_DTYPES), "shape": _whole_numbers, "data_offsets": _whole_numbers}
        schema.fields(f"header[{name!r}]", about, known)
        schema.require(len(about["data_offsets"]) == 2, f"header[{name!r}].data_offsets", about["data_offsets"], "two")
    found, at = {}, _LENGTH + len(header)
    for name, about in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        length = math.prod(about["shape"]) * _DTYPES[about["dtype"]].itemsize
        begin, end = (number + _LENGTH + len(header) for number in about["data_offsets"])
        fits = begin == at and end == at + length <= size and math.prod(max(n, 1) for n in about["shape"]) < 2**59
        schema.require(fits, f"header[{name!r}]", about, f"{length} bytes, behind the last tensor")
        found[name], at = Stored(about["dtype"], tuple(about["shape"]), begin, end), end
    schema.require(at == size, "the header", f"{at} bytes", f"{size}, as the file has")
    return found


_whole_numbers: Any = schema.list_of(schema.whole)
