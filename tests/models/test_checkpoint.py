"""Reading checkpoints that safetensors itself wrote, whole, sharded, quantised and broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from crossdock.core import CheckpointError, QuantSpec
from crossdock.models.checkpoint import INDEX, Checkpoint, dequantise

torch.set_num_threads(1)
FP8 = torch.float8_e4m3fn


def open_checkpoint(path: Path, quant: QuantSpec | None = None, **kwargs) -> Checkpoint:
    return Checkpoint(path, quant, kwargs.pop("dtype", torch.float32), "cpu", **kwargs)


def write_sharded(path: Path, shards: list[dict[str, torch.Tensor]]) -> Path:
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file)
        weight_map |= dict.fromkeys(shard, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def quantise(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, in the plainest way: `(fp8 weight, scales)`."""
    rows, columns = (-(-n // block) for n in weight.shape)
    quantised, scale = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight[at].abs().max() / 448
            quantised[at] = (weight[at] / scale[i, j]).to(FP8)
    return quantised, scale


def test_single_file(tmp_path):
    tensors = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3, dtype=torch.bfloat16),
        "c": torch.randn(2, 3, 4, dtype=torch.float16),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.get(name, tuple(tensor.shape)), tensor.float())
        assert checkpoint.has("a") and not checkpoint.has("z")


def test_sharded_with_an_index(tmp_path):
    shards = [{f"t{i}.{j}": torch.randn(4, 4) for j in range(3)} for i in range(3)]
    with open_checkpoint(write_sharded(tmp_path, shards)) as checkpoint:
        for shard in shards:
            for name, tensor in shard.items():
                assert torch.equal(checkpoint.get(name, (4, 4)), tensor)


def test_dtype_is_the_models_unless_fp32_is_asked_for(tmp_path):
    weight, bias = torch.randn(8, 8, dtype=torch.bfloat16), torch.randn(8)
    save_file({"w": weight, "b": bias}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, dtype=torch.bfloat16) as checkpoint:
        assert torch.equal(checkpoint.get("w", (8, 8)), weight)
        assert torch.equal(checkpoint.get("b", (8,)), bias.bfloat16())
        assert torch.equal(checkpoint.get("b", (8,), fp32=True), bias)
        assert checkpoint.get("w", (8, 8), fp32=True).dtype == torch.float32


def test_tensors_outlive_the_checkpoint_and_are_writable(tmp_path):
    weight = torch.randn(64, 64)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        read = checkpoint.get("w", (64, 64))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(read, weight)
    read += 1
    assert torch.equal(read, weight + 1)


def test_slices_read_only_their_bytes(tmp_path):
    fused = torch.randn(6, 10, 4)
    save_file({"first": torch.randn(3), "experts": fused}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        for index in (5, 0, 3):
            assert torch.equal(checkpoint.get_slice("experts", index, (10, 4)), fused[index])
        assert checkpoint.bytes_read == 3 * 10 * 4 * 4


@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (1, 1), (128, 257), (64, 576)])
def test_fp8_blocks(tmp_path, shape):
    weight = torch.randn(shape) * torch.rand(shape).exp()
    quantised, scale = quantise(weight, 128)
    expected = torch.empty(shape)
    for i in range(shape[0]):
        expected[i] = quantised[i].float() * scale[i // 128].repeat_interleave(128)[: shape[1]]
    save_file({"w": quantised, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, QuantSpec((128, 128))) as checkpoint:
        read = checkpoint.get("w", shape)
        assert torch.equal(read, expected)
        assert (read - weight).abs().max() <= weight.abs().max() / 16
    with open_checkpoint(tmp_path, QuantSpec((128, 128)), dtype=torch.bfloat16) as checkpoint:
        assert torch.equal(checkpoint.get("w", shape), expected.bfloat16())


def test_fp8_of_fused_experts_by_slice(tmp_path):
    parts = [quantise(torch.randn(48, 40), 32) for _ in range(3)]
    weight = torch.stack([w.view(torch.uint8) for w, _ in parts]).view(FP8)
    scale = torch.stack([s for _, s in parts])
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, QuantSpec((32, 32))) as checkpoint:
        for i, (w, s) in enumerate(parts):
            expected = dequantise(w, s, (32, 32))
            assert torch.equal(checkpoint.get_slice("w", i, (48, 40)), expected)


def test_progress_rises_to_the_total(tmp_path):
    shards = [{f"{i}.{j}": torch.randn(50, 50) for j in range(20)} for i in range(2)]
    seen: list[tuple[int, int]] = []
    write_sharded(tmp_path, shards)
    total = 40 * 50 * 50 * 4
    with open_checkpoint(
        tmp_path, on_progress=lambda *args: seen.append(args), total_bytes=total
    ) as checkpoint:
        for shard in shards:
            for name in shard:
                checkpoint.get(name, (50, 50))
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_memory_falls_with_what_a_rank_reads(tmp_path):
    """Resident memory above the start, while the checkpoint is still open, in a new process."""
    save_file({f"e{i}": torch.ones(1024, 1024) for i in range(64)}, tmp_path / "model.safetensors")
    script = """
import sys, torch
from pathlib import Path
from crossdock.models.checkpoint import Checkpoint
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * 4096
checkpoint = Checkpoint(Path(sys.argv[1]), None, torch.float32)
start = resident()
held = [checkpoint.get(f'e{i}', (1024, 1024)) for i in range(0, 64, int(sys.argv[2]))]
print(resident() - start)
"""

    def grown(ranks: int) -> int:
        command = [sys.executable, "-c", script, str(tmp_path), str(ranks)]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=280).stdout)

    megabytes = [grown(ranks) / 2**20 for ranks in (1, 4)]
    assert megabytes[0] < 256 * 1.05 and megabytes[1] < 64 * 1.05 + 4


# What is wrong with a checkpoint ------------------------------------------------------------------


def expect(path: Path, *words: str, quant: QuantSpec | None = None, get: str = "w", **kwargs):
    """Opening, then reading `get` of shape (4, 4), fails with a message that has all `words`."""
    with (
        pytest.raises(CheckpointError) as caught,
        open_checkpoint(path, quant) as checkpoint,
    ):
        if "row" in kwargs:
            checkpoint.get_slice(get, kwargs["row"], (4, 4))
        checkpoint.get(get, (4, 4))
    for word in (*words, str(path)):
        assert word in str(caught.value)


def test_no_such_directory_and_no_weights(tmp_path):
    expect(tmp_path / "nowhere", "not a directory")
    expect(tmp_path, "holds no weights", "model.safetensors", INDEX)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unread(tmp_path, file):
    (tmp_path / file).write_bytes(b"never read")
    expect(tmp_path, file, "run any code", "save_pretrained", f'from_pretrained("{tmp_path}"')


def test_shards_without_index(tmp_path):
    for i in (1, 2):
        save_file({f"w{i}": torch.ones(1)}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    expect(tmp_path, INDEX, "not found", "2 shards")


def test_missing_shard(tmp_path):
    write_sharded(tmp_path, [{"w": torch.ones(4, 4)}, {"x": torch.ones(1)}])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    expect(tmp_path, "model-00002-of-00002.safetensors", "missing shard", "holds x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "weight_map"),
        ('{"weight_map": ["w"]}', "weight_map"),
        ('{"weight_map": {"w": "../secret.safetensors"}}', "not a file beside it"),
    ],
)
def test_bad_index(tmp_path, content, words):
    (tmp_path / INDEX).write_text(content)
    expect(tmp_path, INDEX, words)


def test_index_that_names_the_wrong_shard(tmp_path):
    write_sharded(tmp_path, [{"w": torch.ones(4, 4)}, {"x": torch.ones(1)}])
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["w"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    expect(tmp_path, "model-00002-of-00002.safetensors: tensor w", "not in the file")


@pytest.mark.parametrize("keep", [0, 4, 8, 50, 200, -1])
def test_truncated_file_also_in_a_shard_that_is_not_read(tmp_path, keep):
    write_sharded(tmp_path, [{"w": torch.ones(4, 4)}, {"x": torch.randn(9, 9)}])
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    expect(tmp_path, file.name, "truncated")


def test_file_that_shrinks_while_it_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(4, 4)}, file)
    with open_checkpoint(tmp_path) as checkpoint:
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="tensor w: the file ends within it"):
            checkpoint.get("w", (4, 4))


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff" * 64, "truncated or not a safetensors file"),
        (with_header(b"{nonsense"), "corrupt"),
        (with_header([1]), "corrupt"),
        (with_header(b"[" * 100_000), "corrupt"),
        (with_header({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, "8"]}}), "tensor w"),
        (
            with_header({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234"),
            "tensor w of shape [1.0]",
        ),
        (with_header({"w": {"dtype": "F32"}}), "corrupt"),
        (with_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}), "tensor w"),
        (
            with_header(
                {"w": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}, b"8 bytes."
            ),
            "tensor w: dtype F4",
        ),
        (
            with_header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
            "corrupt",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    ],
)
def test_corrupt_file(tmp_path, content, words):
    (tmp_path / "model.safetensors").write_bytes(content)
    expect(tmp_path, "model.safetensors", words)


def test_missing_tensor_and_wrong_shape(tmp_path):
    save_file({"w": torch.ones(4, 5), "e": torch.ones(3, 4, 5)}, tmp_path / "model.safetensors")
    expect(tmp_path, "tensor z is missing", get="z")
    expect(tmp_path, "model.safetensors: tensor w", "[4, 5]", "[4, 4]")
    expect(tmp_path, "model.safetensors: tensor e", "[3, 4, 5]", "[experts, 4, 4]", get="e", row=0)


def test_slice_beyond_the_experts(tmp_path):
    save_file({"e": torch.ones(3, 4, 4)}, tmp_path / "model.safetensors")
    expect(tmp_path, "tensor e", "[3, 4, 4]", "row 3", get="e", row=3)


def test_fp8_without_config_or_scales(tmp_path):
    weight, scale = quantise(torch.randn(4, 4), 128)
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    expect(tmp_path, "model.safetensors: tensor w", "quantization_config")
    save_file({"w": weight}, tmp_path / "model.safetensors")
    expect(tmp_path, "tensor w", "w_scale_inv are missing", quant=QuantSpec())
    save_file({"w": weight, "w_scale_inv": torch.ones(1, 2)}, tmp_path / "model.safetensors")
    expect(tmp_path, "tensor w_scale_inv", "[1, 2]", "[1, 1]", quant=QuantSpec())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e5m2])
def test_dtypes_that_are_not_weights(tmp_path, dtype):
    save_file({"w": torch.ones(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    expect(tmp_path, "tensor w", str(dtype).removeprefix("torch."), quant=QuantSpec())
