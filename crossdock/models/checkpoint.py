"""Tensors of a Hugging Face checkpoint by name: safetensors only, read as they are asked for.

Knows names of files and the format of the weights; which tensors a model needs, and which of them a
rank holds, is its caller's business.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from crossdock.core import CheckpointError, QuantSpec
from crossdock.models.fp8 import Matrix, quantise, stays_in_blocks, widen
from crossdock.models.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REPORTS = 200


class Checkpoint:
    """A source of weights (`WeightSource`): a tensor is read and cast when it is asked for.

    Args:
        quant: of the model's config; without it FP8 tensors are refused.
        dtype: of the tensors handed out, unless `fp32` is asked for.
        on_progress: called with `(bytes read, total)`, at most a few hundred times.
        total_bytes: what this rank is going to read; None takes the whole checkpoint, so that a
            rank that holds a part of the experts never gets there.

    Raises:
        CheckpointError: names the file and the tensor. Missing and truncated files are found on
            construction, also those this rank will not read.
    """

    def __init__(
        self,
        model_dir: Path,
        quant: QuantSpec | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_progress: Callable[[int, int], None] | None = None,
        total_bytes: int | None = None,
    ):
        self._dir = Path(model_dir)
        self._file_of = _locate(self._dir)
        self._files: dict[str, SafetensorsFile] = {}
        self._quant, self._dtype, self._device = quant, dtype, torch.device(device)
        self._on_progress = on_progress
        self.bytes_read = 0
        self._reported = 0
        try:
            for file in sorted(set(self._file_of.values())):
                self._files[file] = SafetensorsFile(self._dir / file)
        except BaseException:
            self.close()
            raise
        self._total = total_bytes or sum(file.size for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, shape: tuple[int, ...], fp32: bool = False) -> Tensor:
        """The tensor `name` in the model's dtype, or in float32, on the device.

        Raises:
            CheckpointError: it is missing, of another shape, quantised without scales or config, or
                not floating.
        """
        return self._get(name, tuple(shape), None, fp32)

    def get_slice(
        self, name: str, index: int, shape: tuple[int, ...], fp32: bool = False
    ) -> Tensor:
        """Row `index` of a fused expert tensor: `shape` is the row's. Reads only its bytes."""
        return self._get(name, tuple(shape), index, fp32)

    def in_fp8(self, name: str) -> bool:
        """Whether `get_fp8` is for this tensor: all of a checkpoint that is not quantised, of
        another those that are stored so."""
        if self._quant is None or name not in self._file_of:
            return True
        return self._file(name).dtype(name) == torch.float8_e4m3fn

    def get_fp8(
        self,
        name: str,
        shape: tuple[int, int],
        index: int | None = None,
        order: Tensor | None = None,
    ) -> Matrix:
        """A matrix as it is stored in FP8, or quantised; in blocks of 128x128.

        Args:
            index: of a fused expert tensor, whose row is of `shape`.
            order: of the rows.

        Raises:
            CheckpointError: as `get`.
        """
        raw = self._read(name, tuple(shape), index)
        stored = raw.dtype == torch.float8_e4m3fn
        if stored and (order is None or stays_in_blocks(order)):
            scales = self._scales(name, raw, index).float()
            return widen(raw.to(self._device), scales.to(self._device), order)
        w_OI = self._cast(name, raw, index, self._dtype)
        return quantise(w_OI if order is None else w_OI[order.to(w_OI.device)])

    def _get(self, name: str, shape: tuple[int, ...], row: int | None, fp32: bool) -> Tensor:
        raw = self._read(name, shape, row)
        return self._cast(name, raw, row, torch.float32 if fp32 else self._dtype)

    def _cast(self, name: str, raw: Tensor, row: int | None, dtype: torch.dtype) -> Tensor:
        if raw.dtype == torch.float8_e4m3fn:
            raw = self._dequantise(name, raw, row)
        elif raw.dtype not in _FLOATING:
            raise self._error(
                name,
                f"dtype {_short(raw.dtype)}; expected floating-point weights, or float8_e4m3fn",
            )
        return raw.to(self._device).to(dtype)

    def _read(self, name: str, shape: tuple[int, ...], row: int | None) -> Tensor:
        if name not in self._file_of:
            raise CheckpointError(f"{self._dir}: tensor {name} is missing")
        file = self._file(name)
        found = file.shape(name)
        if found[(0 if row is None else 1) :] != shape:
            expected = list(shape) if row is None else f"[experts, {', '.join(map(str, shape))}]"
            raise self._error(name, f"shape {list(found)}, expected {expected}")
        if row is not None and not 0 <= row < found[0]:
            raise self._error(name, f"shape {list(found)}, but row {row} is asked for")
        tensor = file.read(name, row)
        self._progress(tensor.nbytes)
        return tensor

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files[self._file_of[name]]
        if name not in file:
            raise self._error(name, f"is not in the file, though {INDEX} says so")
        return file

    def _dequantise(self, name: str, weight: Tensor, row: int | None) -> Tensor:
        scale = self._scales(name, weight, row).float()
        assert self._quant is not None
        return dequantise(weight, scale, self._quant.block)

    def _scales(self, name: str, weight: Tensor, row: int | None) -> Tensor:
        if self._quant is None:
            raise self._error(
                name, "FP8, but config.json has no quantization_config, which gives the block size"
            )
        scale_name = name + SCALE_SUFFIX
        if scale_name not in self._file_of:
            raise self._error(name, f"FP8, but its scales {scale_name} are missing")
        if weight.dim() != 2:
            raise self._error(name, f"FP8 of shape {list(weight.shape)}; expected a matrix")
        blocks = tuple(-(-n // b) for n, b in zip(weight.shape, self._quant.block, strict=True))
        scale = self._read(scale_name, blocks, row)
        if scale.dtype not in _FLOATING:
            raise self._error(scale_name, f"dtype {_short(scale.dtype)}; expected float32 scales")
        return scale

    def _progress(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        if self._on_progress and self.bytes_read - self._reported >= self._total // _REPORTS:
            self._reported = self.bytes_read
            self._on_progress(self.bytes_read, max(self.bytes_read, self._total))

    def _error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._dir / self._file_of[name]}: tensor {name}: {what}")


def dequantise(weight_OI: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 `[O, I]`; `scale` is `[ceil(O / block[0]), ceil(I / block[1])]`."""
    out_OI = weight_OI.float()
    scale_O = scale.repeat_interleave(block[0], 0)[: out_OI.shape[0]]
    # Column by column of blocks: scales expanded to [O, I] would take the weight's memory again.
    for j in range(scale.shape[1]):
        out_OI[:, j * block[1] : (j + 1) * block[1]] *= scale_O[:, j, None]
    return out_OI


def _locate(model_dir: Path) -> dict[str, str]:
    """The name of the file that holds each tensor."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: not a directory")
    if (model_dir / INDEX).exists():
        return _read_index(model_dir)
    files = sorted(p.name for p in model_dir.glob("*.safetensors"))
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if len(files) == 1:
        file = SafetensorsFile(model_dir / files[0])
        file.close()
        return dict.fromkeys(file.names(), files[0])
    if files:
        raise CheckpointError(f"{model_dir / INDEX}: not found, and there are {len(files)} shards")
    pickled = sorted(p.name for p in model_dir.iterdir() if p.suffix in _PICKLED)
    if pickled:
        raise CheckpointError(_PICKLE_REFUSED.format(dir=model_dir, file=pickled[0]))
    raise CheckpointError(f"{model_dir}: holds no weights; expected model.safetensors or {INDEX}")


def _read_index(model_dir: Path) -> dict[str, str]:
    path = model_dir / INDEX
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: expected an object with a 'weight_map'") from None
    for file in sorted(set(pairs.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path}: names {file!r}, which is not a file beside it")
        if not (model_dir / file).is_file():
            first = next(name for name in pairs if pairs[name] == file)
            raise CheckpointError(
                f"{model_dir / file}: missing shard; {INDEX} says it holds {first} and others"
            )
    return pairs


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PICKLE_REFUSED = """\
{dir}: holds {file} but no safetensors. Such files are pickled: reading one can run any code its \
author put there, so they are refused. Convert it on a machine you can afford to lose:
  from transformers import AutoModelForCausalLM
  model = AutoModelForCausalLM.from_pretrained("{dir}", dtype="auto")
  model.save_pretrained("converted")  # writes safetensors; copy the tokenizer's files there too"""
