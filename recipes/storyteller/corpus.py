"""Text side of the recipe: books, tokenizer, training batches and evaluation windows.

Knows nothing about the model. A corpus is one text file (plain or .gz) whose books are separated
by a line `<|endoftext|>`; books are numbered from 1 in file order.

Shapes: N stream tokens, B windows, S tokens in a window.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"  # begins every window and separates books; id 0
VOCAB_SIZE = 4096
# Words keep their leading space, punctuation keeps the line breaks behind it.
WORD = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
)


def read_books(path: Path) -> list[str]:
    """The books of a corpus file, without the separators."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [book.strip("\n") + "\n" for book in data.decode().split(f"\n{END}\n") if book.strip()]


def train_tokenizer(books: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE ids that begins every text with END."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, 0)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": True,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_books(tokenizer: Tokenizer, books: list[str]) -> list[torch.Tensor]:
    """One id tensor per book, without END."""
    encoded = tokenizer.encode_batch(books, add_special_tokens=False)
    return [torch.tensor(e.ids) for e in encoded]


def line_starts(tokenizer: Tokenizer, stream_N: torch.Tensor) -> torch.Tensor:
    """Positions of the stream where a paragraph (or a line of verse) or a book begins."""
    ends_line_V = torch.tensor(
        [i == 0 or tokenizer.decode([i]).endswith("\n") for i in range(VOCAB_SIZE)]
    )
    return ends_line_V[stream_N].nonzero().squeeze(1) + 1


def batches(
    stream_N: torch.Tensor, starts: torch.Tensor, size: int, batch: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_BS, target_BS); each epoch cuts the stream at a new phase, in a new order.

    A window begins at the start of a line, and its first input is END: the model learns that
    END means "here a paragraph begins", which is what a prompt looks like when served.
    """
    device = stream_N.device
    rng = torch.Generator(device).manual_seed(seed)
    offset_S = torch.arange(size, device=device)
    end_B1 = stream_N.new_zeros(batch, 1)
    while True:
        phase = torch.randint(size, (1,), generator=rng, device=device)
        begin = torch.arange(0, len(stream_N) - 2 * size, size, device=device) + phase
        begin = begin[torch.randperm(len(begin), generator=rng, device=device)]
        before = torch.searchsorted(starts, begin, right=True) - 1
        begin = starts[before.clamp(min=0)]
        for i in range(0, len(begin) - batch + 1, batch):
            target_BS = stream_N[begin[i : i + batch, None] + offset_S]
            yield torch.cat((end_B1, target_BS[:, :-1]), dim=1), target_BS


def windows(ids: torch.Tensor, size: int, stride: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Sliding (input_S, target_S, fresh_S) over one text; every id is fresh exactly once.

    Inputs begin with END. After the first window a fresh id sees at least size - stride ids.
    """
    done = 0
    while done < len(ids):
        begin = max(0, min(done - (size - stride), len(ids) - size)) if done else 0
        target_S = ids[begin : begin + size]
        input_S = torch.cat((ids.new_zeros(1), target_S[:-1]))
        fresh_S = torch.arange(begin, begin + len(target_S)) >= done
        yield input_S, target_S, fresh_S
        done = begin + len(target_S)
