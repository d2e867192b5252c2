"""Small random checkpoints written by transformers, and a driver for our models."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from crossdock.balance import linear_placement
from crossdock.cache import KVCache
from crossdock.comm import LocalTransport
from crossdock.core import ForwardBatch, ModelSpec, load_spec
from crossdock.metrics import Recorder
from crossdock.models import Decoder, ModelContext, WeightSource, build_model
from crossdock.models.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Session:
    """Sequences over one model and one paged cache. Pages are handed out scattered, and freed ones
    stay dirty, as in an engine."""

    model: Decoder
    spec: ModelSpec
    dtype: torch.dtype = torch.float32
    page_size: int = 4
    num_pages: int = 256
    kv_dtype: torch.dtype | None = None
    pages: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = KVCache(
            self.spec.attention,
            self.spec.num_layers,
            self.num_pages,
            self.page_size,
            self.kv_dtype or self.dtype,
            self.device,
        )
        for index in range(self.spec.num_layers):
            for tensor in self.kv.layer(index):
                tensor.copy_(torch.randn(tensor.shape))
        generator = torch.Generator().manual_seed(0)
        self.free = torch.randperm(self.num_pages, generator=generator).tolist()

    @property
    def device(self) -> torch.device:
        return self.model.embedding_VH.device

    @torch.inference_mode()
    def step(self, work: dict[str, list[int]]) -> dict[str, Tensor]:
        """Runs the next tokens of each sequence, those with one token first; logits [n, V] each."""
        order = sorted(work, key=lambda name: len(work[name]) > 1)
        tokens, positions, slots, kv_lens = [], [], [], []
        for name in order:
            pages, start = self.pages.setdefault(name, []), self.done.get(name, 0)
            end = start + len(work[name])
            while len(pages) * self.page_size < end:
                pages.append(self.free.pop())
            tokens += work[name]
            positions += range(start, end)
            slots += [
                pages[p // self.page_size] * self.page_size + p % self.page_size
                for p in range(start, end)
            ]
            self.done[name] = end
            kv_lens.append(end)
        width = max((len(self.pages[name]) for name in order), default=1)
        table = [self.pages[name] + [0] * (width - len(self.pages[name])) for name in order]
        lens = tuple(len(work[name]) for name in order)
        batch = ForwardBatch(
            tokens_T=self._ids(tokens),
            positions_T=self._ids(positions),
            kv_slots_T=self._ids(slots),
            keys_T=self._ids(positions),
            query_lens=lens,
            kv_lens=tuple(kv_lens),
            page_table_BP=self._ids(table).view(len(order), width),
            sample_rows=self._ids([]),
            num_decodes=sum(n == 1 for n in lens),
            kv_lens_B=self._ids(kv_lens).int(),
            prefill_starts_B1=self._ids([0, *(n for n in lens if n > 1)]).cumsum(0).int(),
        )
        hidden_TH = drain(self.model.forward(batch, self.kv))
        rows = self.model.logits(hidden_TH).cpu().split(lens) if lens else ()
        return dict(zip(order, rows, strict=True))

    def _ids(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def drop(self, name: str) -> None:
        self.free += self.pages.pop(name)
        del self.done[name]


def drain(forward) -> Tensor:
    while True:
        try:
            next(forward)
        except StopIteration as stop:
            return stop.value


def make_session(
    spec: ModelSpec,
    source: WeightSource,
    *,
    invariant: bool = False,
    dtype: torch.dtype = torch.float32,
    page_size: int = 4,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Session:
    placement = linear_placement(len(spec.moe_layers), spec.moe.num_experts, 1)
    context = ModelContext(
        rank=0,
        device=torch.device(device),
        dtype=dtype,
        invariant=invariant,
        placement=placement,
        transport=LocalTransport(per_expert=invariant),
        recorder=Recorder(),
        max_model_len=spec.max_position,
    )
    with torch.inference_mode():
        return Session(
            build_model(spec, source, context), spec, dtype, page_size, kv_dtype=kv_dtype
        )


@pytest.fixture
def session():
    """`make_session`, or from a directory: (path, **options)."""

    def make(path_or_spec: Path | ModelSpec, source: WeightSource | None = None, **options):
        if isinstance(path_or_spec, ModelSpec):
            assert source is not None
            return make_session(path_or_spec, source, **options)
        spec = load_spec(path_or_spec)
        dtype = options.get("dtype", torch.float32)
        with Checkpoint(path_or_spec, spec.quant, dtype) as checkpoint:
            return make_session(spec, checkpoint, **options)

    return make
