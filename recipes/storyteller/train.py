"""Train the storyteller: `python train.py --text stories.txt.gz --held-out 10 31 41 --out DIR`.

The learning rate falls linearly to zero over `--steps` steps or `--minutes` minutes, whichever
end first. Balancing is auxiliary-loss-free (DeepSeek-V3): after each step the
router bias of an overloaded expert falls by gamma and that of an underloaded one rises; a
sequence-wise loss of weight 1e-4 guards single windows. The bias never enters the gate.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import (
    batches,
    encode_books,
    line_starts,
    read_books,
    save_tokenizer,
    train_tokenizer,
    windows,
)
from model import Storyteller
from muon import Muon
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
    "hidden_size": 320,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "intermediate_size": 960,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_interleave": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.95,
}
GAMMA, ALPHA = 1e-3, 1e-4  # bias step per update; weight of the sequence-wise loss
WARMUP, STRIDE = 100, 512


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--text", type=Path, required=True, help="books, separated by <|endoftext|>")
    p.add_argument("--held-out", type=int, nargs="+", default=[], help="book numbers, from 1")
    p.add_argument("--skip", type=int, nargs="*", default=[], help="books neither seen nor scored")
    p.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    p.add_argument("--minutes", type=float, default=30, help="time budget, compilation included")
    p.add_argument("--steps", type=int, default=4115, help="end the schedule here at the latest")
    p.add_argument("--batch", type=int, default=32, help="windows per step")
    p.add_argument("--lr", type=float, default=0.012, help="of Muon; AdamW gets a third")
    p.add_argument("--weight-decay", type=float, default=1.5)
    p.add_argument("--dropout", type=float, default=0.2)
    p.add_argument("--evals", type=int, default=8, help="held-out evaluations on the way")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--set", nargs="*", default=[], metavar="KEY=INT", help="change the shape")
    p.add_argument("--no-compile", action="store_true")
    return p.parse_args()


def optimizers(model: Storyteller, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks; AdamW for embeddings, head, routers and norms."""
    matrices, tables, small = [], [], []
    for name, p in model.named_parameters():
        if p.dim() == 1 or "mlp.gate.weight" in name:
            small.append(p)
        else:
            (tables if "embed" in name or "lm_head" in name else matrices).append(p)
    groups = [{"params": tables, "weight_decay": weight_decay}, {"params": small}]
    fused = matrices[0].is_cuda
    adamw = torch.optim.AdamW(groups, lr / 3, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
    optims = [Muon(matrices, lr, weight_decay), adamw]
    for group in (g for o in optims for g in o.param_groups):
        group["peak"] = group["lr"]
    return optims


def loss_of(model: Storyteller, hidden_BSD: torch.Tensor, target_BS: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden_BSD).float()
    return F.cross_entropy(logits.flatten(0, 1), target_BS.flatten())


@torch.no_grad()
def update_bias(model: Storyteller, loads: list[torch.Tensor], gamma: float) -> None:
    """Sign update: underloaded experts up by gamma, overloaded ones down."""
    for router, load_E in zip(model.routers(), loads, strict=True):
        router.e_score_correction_bias += gamma * torch.sign(load_E.mean() - load_E)


@torch.no_grad()
def evaluate(model: Storyteller, books: list[torch.Tensor], n_bytes: int, stride: int) -> dict:
    """Bits per byte over the books in fp32, every token scored once, and MaxVio per MoE layer.

    Each book must fill a window.
    """
    model.eval()
    size, device = model.c.max_position_embeddings, model.cos.device
    rows = [w for ids in books for w in windows(ids, size, stride)]
    nll, load = 0.0, 0
    for i in range(0, len(rows), 32):
        x, y, fresh = (torch.stack(t).to(device) for t in zip(*rows[i : i + 32], strict=True))
        hidden, loads, _ = model(x)
        nll_BS = F.cross_entropy(model.lm_head(hidden).float().transpose(1, 2), y, reduction="none")
        nll += nll_BS[fresh].double().sum().item()
        load += torch.stack(loads)
    model.train()
    vio = (load.amax(-1) / load.mean(-1) - 1).tolist()
    return {
        "bits_per_byte": round(nll / math.log(2) / n_bytes, 4),
        "max_vio": [round(v, 3) for v in vio],
    }


def train(
    model: Storyteller, stream_N: torch.Tensor, starts: torch.Tensor, args, report: Callable
) -> int:
    """Run the time budget; returns the number of steps."""
    begin = time.monotonic()
    optims = optimizers(model, args.lr, args.weight_decay)
    loss_fn = loss_of
    if not args.no_compile:
        model.run_block, loss_fn = torch.compile(model.run_block), torch.compile(loss_of)
    device = stream_N.device
    size = model.c.max_position_embeddings
    data = batches(stream_N, starts, size, args.batch, args.seed)
    next_eval, step, progress = 1.0 / args.evals, 0, 0.0
    while progress < 1:
        scale = min(1.0, (step + 1) / WARMUP) * (1 - progress)
        for group in (g for o in optims for g in o.param_groups):
            group["lr"] = group["peak"] * scale
        x_BS, y_BS = next(data)
        with torch.autocast(device.type, torch.bfloat16):
            hidden, loads, balance = model(x_BS)
            loss = loss_fn(model, hidden, y_BS)
        (loss + ALPHA * balance).backward()
        for o in optims:
            o.step()
            o.zero_grad()
        update_bias(model, loads, GAMMA * min(1.0, 4 * (1 - progress)))
        step += 1
        if step % 20 == 0:
            loss.item()  # the clock below should not run ahead of the GPU
        if step == 3:
            report(step=step, first_steps_s=round(time.monotonic() - begin, 1))
        elapsed = (time.monotonic() - begin) / (60 * args.minutes)
        progress = max(elapsed, step / args.steps)
        if progress >= next_eval:
            next_eval += 1.0 / args.evals
            tokens = step * args.batch * size
            report(
                step=step,
                progress=round(progress, 3),
                epochs=round(tokens / len(stream_N), 1),
                train_loss=round(loss.item(), 4),
            )
    return step


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {k: int(v) for k, v in (s.split("=") for s in args.set)}

    books = read_books(args.text)
    out_of_train = {*args.held_out, *args.skip}
    train_books = [b for i, b in enumerate(books, 1) if i not in out_of_train]
    held_books = [books[i - 1] for i in args.held_out]
    tokenizer = train_tokenizer(train_books)
    save_tokenizer(tokenizer, args.out, config["max_position_embeddings"])
    end = torch.zeros(1, dtype=torch.long)
    ids = encode_books(tokenizer, train_books)
    stream_N = torch.cat([t for book in ids for t in (end, book)] + [end])
    starts = line_starts(tokenizer, stream_N)
    held = encode_books(tokenizer, held_books)
    n_bytes = sum(len(b.encode()) for b in held_books)

    model = Storyteller(config, args.dropout).to(device)
    n_params = sum(p.numel() for p in model.parameters())

    def report(**fields) -> None:
        if held and "progress" in fields:
            fields |= evaluate(model, held, n_bytes, STRIDE)
        print(json.dumps(fields), flush=True)

    report(params=n_params, train_tokens=len(stream_N))
    steps = train(model, stream_N.to(device), starts.to(device), args, report)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())  # score what is saved
    save_file(model.export(), args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    report(step=steps, progress=1.0, final=True)


if __name__ == "__main__":
    main()
