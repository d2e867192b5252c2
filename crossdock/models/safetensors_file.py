"""Reading one safetensors file by positioned reads.

Not by memory mapping: mapped pages count as resident memory until the file is closed, and a rank
that holds a fraction of the experts must cost a fraction of the memory, while loading too.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.core import CheckpointError
from crossdock.core.json_values import is_whole

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsFile:
    """An open file and its table of contents; `close()` when done.

    Raises:
        CheckpointError: the file is missing, truncated, or not a valid safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self.size = os.fstat(self._fd).st_size
            self._data_start, self._entries = _read_header(path, self._fd, self.size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._entries[name]["dtype"]
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name}: dtype {dtype} is not supported; "
                f"supported: {', '.join(DTYPES)}"
            )
        return DTYPES[dtype]

    def read(self, name: str, row: int | None = None) -> Tensor:
        """The tensor, or only index `row` of its first dimension, in new CPU memory."""
        dtype, shape = self.dtype(name), self.shape(name)
        begin, end = self._entries[name]["data_offsets"]
        if row is not None:
            size = (end - begin) // shape[0]
            begin, end, shape = begin + row * size, begin + (row + 1) * size, shape[1:]
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        self._read_into(buffer.numpy().data, self._data_start + begin, name)
        return buffer.view(dtype).view(shape)

    def _read_into(self, view: memoryview, offset: int, name: str) -> None:
        while view:
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {name}: cannot be read: {error.strerror}"
                ) from None
            if count == 0:
                raise CheckpointError(f"{self.path}: tensor {name}: the file ends within it")
            view, offset = view[count:], offset + count


def _read_header(path: Path, fd: int, size: int) -> tuple[int, dict[str, Any]]:
    """`(offset of the data, entries by tensor name)`, checked against the size of the file."""
    start = os.pread(fd, 64, 0)
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(f"{path}: a git-lfs pointer, not the weights; run `git lfs pull`")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file: {size} bytes, with a header of {length}"
        )
    try:
        header = json.loads(os.pread(fd, length, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            _check_entry(path, name, entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt: its header is not valid: {error!r}") from None
    expected = 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0)
    if size != expected:
        what = "truncated" if size < expected else "corrupt"
        raise CheckpointError(f"{path}: {what}: {size} bytes, its header describes {expected}")
    return 8 + length, header


def _check_entry(path: Path, name: str, entry: dict[str, Any]) -> None:
    begin, end = entry["data_offsets"]
    if not all(is_whole(n, 0) for n in (begin, end, *entry["shape"])):
        raise ValueError(f"tensor {name} of shape {entry['shape']} at {begin} to {end}")
    if entry["dtype"] not in DTYPES:
        return  # newer than this table; refused if it is asked for
    bytes_expected = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    if end - begin != bytes_expected:
        raise CheckpointError(
            f"{path}: corrupt: tensor {name} of {entry['dtype']} {entry['shape']} "
            f"should take {bytes_expected} bytes, its header gives {end - begin}"
        )
