"""Compare the recipe's forward pass with transformers': `python verify.py CHECKPOINT [TEXT]`.

Prints the largest difference of the fp32 logits over 1,024 tokens. A near tie between two experts
can fall either way in two implementations, so a lone larger value at few positions is possible.
"""

import argparse
import json
from pathlib import Path

import torch
from corpus import read_books
from model import Storyteller
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "Once upon a time there lived a king who had three daughters.\n\n"


@torch.inference_mode()
def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("text", type=Path, nargs="?", help="default: one sentence, repeated")
    args = p.parse_args()
    text = read_books(args.text)[0][:8000] if args.text else PROMPT * 80

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    ids_BS = tokenizer(text, return_tensors="pt", truncation=True).input_ids
    theirs = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    ours = Storyteller(json.loads((args.checkpoint / "config.json").read_text())).eval()
    ours.load(load_file(args.checkpoint / "model.safetensors"))

    logits_BSV, expected_BSV = ours.lm_head(ours(ids_BS)[0]), theirs(ids_BS).logits
    diff_S = (logits_BSV - expected_BSV).abs().amax(-1)[0]
    result = {
        "tokens": len(diff_S),
        "max_diff": diff_S.max().item(),
        "median_diff": diff_S.median().item(),
        "logit_std": expected_BSV.std().item(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
