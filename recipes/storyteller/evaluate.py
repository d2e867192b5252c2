"""Score a checkpoint with unmodified transformers: `python evaluate.py CHECKPOINT TEXT`.

Prints, as JSON: bits per byte (sum of -log2 p over the tokens of each book, every token once, over
the bytes of its text) and MaxVio (max / mean expert load - 1) per MoE layer. Sliding windows of
`--context` tokens; after a book's first window a token sees at least context - stride tokens.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import read_books, windows
from transformers import AutoModelForCausalLM, AutoTokenizer


def watch_load(model: torch.nn.Module, scored: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Count the experts chosen at the scored positions; a live {router name: load_E}."""
    loads = {}

    def hook(name):
        def count(router, _, output):
            topk_TK = output[2][scored[0].flatten()]
            loads[name] = loads.get(name, 0) + topk_TK.flatten().bincount(
                minlength=router.num_experts
            )

        return count

    for name, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(hook(name))
    return loads


@torch.inference_mode()
def score_book(model, ids: torch.Tensor, context: int, stride: int, batch: int, scored: list):
    """Summed -log2 p of the ids of one text."""
    rows, bits = list(windows(ids, context, stride)), 0.0
    for i in range(0, len(rows), batch):
        columns = zip(*rows[i : i + batch], strict=True)
        input_BS, target_BS, fresh_BS = (torch.stack(t).to(model.device) for t in columns)
        scored[:] = [fresh_BS]
        logits_BSV = model(input_BS, use_cache=False).logits.float()
        nll_BS = F.cross_entropy(logits_BSV.transpose(1, 2), target_BS, reduction="none")
        bits += nll_BS[fresh_BS].double().sum().item() / math.log(2)
    return bits


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("text", type=Path, help="books, separated by <|endoftext|>")
    p.add_argument("--books", type=int, nargs="*", help="book numbers, from 1 (default: all)")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--stride", type=int, default=512)
    p.add_argument("--batch", type=int, default=4)
    args = p.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    books = read_books(args.text)
    scored: list[torch.Tensor] = []
    loads = watch_load(model, scored)
    all_bits = all_bytes = 0
    for number in args.books or range(1, len(books) + 1):
        text = books[number - 1]
        ids = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt")[
            "input_ids"
        ][0]
        bits = score_book(model, ids, args.context, args.stride, args.batch, scored)
        n_bytes = len(text.encode())
        print(json.dumps({"book": number, "bits_per_byte": round(bits / n_bytes, 4)}), flush=True)
        all_bits, all_bytes = all_bits + bits, all_bytes + n_bytes
    vio = {n: round((c.max() / c.float().mean()).item() - 1, 3) for n, c in loads.items()}
    result = {"bits_per_byte": round(all_bits / all_bytes, 4), "bytes": all_bytes, "max_vio": vio}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
