"""Train a Llama-style decoder on bytes with FSDP2, and keep it training through faults.

    python examples/train_llama.py                                       one process, no recovery
    torchrun --nproc-per-node 2 examples/train_llama.py                  two, no recovery
    stepfast run --nodes 2 --nproc-per-node 2 examples/train_llama.py    a cluster that survives

All of it is plain PyTorch, but for the decorator, `run.once`, `run.track` and `run.steps`.

Shape suffixes: B batch, S sequence, T = S + 1 (the inputs and the last target), N windows,
V vocabulary, D model width, F feed-forward width, H query heads, K key/value heads, E head width,
R half of it (rotated pairs). `logits_BSV` is [B, S, V].
"""

import argparse
import hashlib
import math
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stepfast

Linear = partial(nn.Linear, bias=False)
VOCABULARY = 256  # a token is a byte
ROPE_BASE = 500_000.0  # as in Llama 3
CORPUS_BYTES_MAX = 64 * 2**20  # start-up stays short on any directory
EVAL_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    sequence_length: int
    batch_size: int
    lr: float
    reshard: bool  # free a block's full weights after its forward: less memory, more all-gathers


# fmt: off
SIZES = {
    # 0.9 M. Two wide layers, for on a CPU the collectives and kernels, not the bytes, take time.
    "debug": Size(dim=192, layers=2, heads=6, kv_heads=2, ffn_dim=512,
                  sequence_length=32, batch_size=2, lr=3e-3, reshard=False),
    # 25 M.
    "small": Size(dim=512, layers=8, heads=8, kv_heads=4, ffn_dim=1536,
                  sequence_length=256, batch_size=8, lr=1e-3, reshard=False),
    # 134 M, with AdamW 1.6 GB of state: bytes take time here, too.
    "medium": Size(dim=1024, layers=10, heads=16, kv_heads=8, ffn_dim=3328,
                   sequence_length=256, batch_size=8, lr=6e-4, reshard=False),
    # 8 B. Llama 3 8B; five more layers stand in for the large vocabulary that bytes do not need.
    "8b": Size(dim=4096, layers=37, heads=32, kv_heads=8, ffn_dim=14336,
               sequence_length=4096, batch_size=1, lr=3e-4, reshard=True),
}
# fmt: on


def rope_table(length: int, head_dim: int, device: torch.device) -> Tensor:
    """Cosine and sine of each angle. Made in each forward: no buffer to initialise or restore."""
    exponent_R = torch.arange(0, head_dim, 2, device=device) / head_dim
    angle_SR = torch.outer(torch.arange(length, device=device), ROPE_BASE**-exponent_R)
    return torch.stack((angle_SR.cos(), angle_SR.sin()))


def rotate(x_BHSE: Tensor, table_2SR: Tensor) -> Tensor:
    a_BHSR, b_BHSR = x_BHSE.float().chunk(2, dim=-1)
    cos_SR, sin_SR = table_2SR
    rotated = (a_BHSR * cos_SR - b_BHSR * sin_SR, a_BHSR * sin_SR + b_BHSR * cos_SR)
    return torch.cat(rotated, dim=-1).type_as(x_BHSE)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.query = Linear(size.dim, size.heads * self.head_dim)
        self.key = Linear(size.dim, size.kv_heads * self.head_dim)
        self.value = Linear(size.dim, size.kv_heads * self.head_dim)
        self.out = Linear(size.heads * self.head_dim, size.dim)

    def forward(self, x_BSD: Tensor, table_2SR: Tensor) -> Tensor:
        projections = (self.query, self.key, self.value)
        heads = (p(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q_BHSE, k_BKSE, v_BKSE = heads
        q_BHSE, k_BKSE = rotate(q_BHSE, table_2SR), rotate(k_BKSE, table_2SR)
        mixed_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True
        )
        out_BSD: Tensor = self.out(mixed_BHSE.transpose(1, 2).flatten(2))
        return out_BSD


class SwiGLU(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = Linear(size.dim, size.ffn_dim)
        self.up = Linear(size.dim, size.ffn_dim)
        self.down = Linear(size.ffn_dim, size.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out_BSD


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.ffn = SwiGLU(size)

    def forward(self, x_BSD: Tensor, table_2SR: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), table_2SR)
        out_BSD: Tensor = x_BSD + self.ffn(self.ffn_norm(x_BSD))
        return out_BSD


class Llama(nn.Module):
    """The output head is not tied to the embedding: with 256 tokens tying would save nothing, and
    a weight that two modules share is the one thing here that sharding could get wrong."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.embedding = nn.Embedding(VOCABULARY, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = Linear(size.dim, VOCABULARY)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        table_2SR = rope_table(tokens_BS.shape[1], self.head_dim, tokens_BS.device)
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, table_2SR)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Give each weight the values that the seed and its name say, whatever the world size.

    Each rank draws one full weight at a time and keeps its own shard: nothing is communicated.
    """
    for name, weight in model.named_parameters():
        assert isinstance(weight, DTensor)
        local = weight.to_local()
        if weight.ndim == 1:
            local.fill_(1.0)  # a norm's gain
            continue
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        draw = torch.Generator(local.device).manual_seed(int.from_bytes(key[:8]))
        full = torch.empty(weight.shape, device=local.device).normal_(std=0.02, generator=draw)
        shard = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
        local.copy_(shard.to_local())


def build_model(run: stepfast.Run, size: Size, seed: int) -> Llama:
    """A sharded model on the run's device; its weights are drawn unless they will be restored."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if run.device.type == "cuda" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the table of angles stays exact
    )
    with torch.device("meta"):  # no rank ever holds the whole model
        model = Llama(size)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=run.mesh, mp_policy=policy, reshard_after_forward=size.reshard)
    model.to_empty(device=run.device)
    if not run.resuming:
        init_weights(model, seed)
    return model


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> tuple[AdamW, LambdaLR]:
    """AdamW that decays matrices only, and its schedule: warm-up, then a cosine to a tenth."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    gains = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    steps: int = args.steps
    warmup_steps = max(1, min(100, steps // 10))

    def lr_factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min((step + 1) / warmup_steps, 0.1 + 0.9 * cosine)

    return optimizer, LambdaLR(optimizer, lr_factor)


def read_corpus(directory: Path) -> bytearray:
    """The text files that lie in `directory`, joined in the order of their names, up to a limit.

    Left out are files that cannot be read and files that are no text (they hold a NUL byte).
    """
    corpus = bytearray()
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            text = path.read_bytes() if path.is_file() and len(corpus) < CORPUS_BYTES_MAX else b""
        except OSError:
            continue
        corpus += text if b"\0" not in text else b""
    return corpus[:CORPUS_BYTES_MAX]


class LazySampler(DistributedSampler[int]):
    """The order is a function of seed and epoch alone, and made when the first index is asked for:
    a loader that resumes makes iterators which it never uses."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


def build_data(
    run: stepfast.Run, args: argparse.Namespace, corpus: bytearray
) -> tuple[StatefulDataLoader[list[Tensor]], Tensor]:
    """This rank's share of the training windows, as a loader, and of the held-out ones."""
    length = args.sequence_length
    windows = (len(corpus) - 1) // length
    cut = windows - windows // 16  # the end of the corpus is held out
    eval_windows = args.batch_size * EVAL_BATCHES * run.world_size
    if eval_windows > windows - cut:
        raise ValueError(
            f"--data {args.data}: {len(corpus)} bytes of text are too few; give more, "
            "a smaller --batch-size or a shorter --sequence-length"
        )
    # Each window ends with the token that the next one starts with: it is a target there only.
    windows_NT = torch.frombuffer(corpus, dtype=torch.uint8).unfold(0, length + 1, length)
    training = TensorDataset(windows_NT[:cut])
    sampler = LazySampler(training, run.world_size, run.rank, seed=args.seed, drop_last=True)
    batches = StatefulDataLoader(
        training, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    held_out_NT = windows_NT[cut : cut + eval_windows][run.rank :: run.world_size]
    return batches, held_out_NT.to(run.device)


def build(run: stepfast.Run, args: argparse.Namespace, corpus: bytearray) -> tuple[Any, Tensor]:
    model = build_model(run, SIZES[args.size], args.seed)
    optimizer, schedule = build_optimizer(model, args)
    batches, held_out_NT = build_data(run, args, corpus)
    state = run.track(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    return state, held_out_NT


def next_byte_loss(model: nn.Module, window_BT: Tensor) -> Tensor:
    token_BT = window_BT.long()
    logits_BSV: Tensor = model(token_BT[:, :-1])
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), token_BT[:, 1:].flatten())


@torch.no_grad()
def evaluate(run: stepfast.Run, model: nn.Module, held_out_NT: Tensor) -> Tensor:
    """The mean loss over every rank's held-out windows; it stays on the device."""
    losses = [next_byte_loss(model, window_BT) for window_BT in held_out_NT.chunk(EVAL_BATCHES)]
    mean: Tensor = torch.stack(losses).mean() / run.world_size
    dist.all_reduce(mean, group=run.mesh.get_group())
    return mean


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace, corpus: bytearray) -> None:
    state, held_out_NT = run.once(partial(build, args=args, corpus=corpus))
    for step in run.steps(args.steps):
        loss = torch.zeros((), device=run.device)
        for micro_step in range(args.accumulate):
            # Gradients cross the network once a step, in the last micro-batch's backward.
            state.model.set_requires_gradient_sync(micro_step == args.accumulate - 1)
            (window_BT,) = next(state.batches)
            micro_loss = next_byte_loss(state.model, window_BT.to(run.device)) / args.accumulate
            micro_loss.backward()
            loss += micro_loss.detach()
        if args.clip_norm:
            nn.utils.clip_grad_norm_(state.model.parameters(), args.clip_norm)
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()
        metrics = {"loss": loss}
        if (step + 1) % args.eval_every == 0:
            with run.section("eval"):
                metrics["eval_loss"] = evaluate(run, state.model, held_out_NT)
        run.log(**metrics)


def positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama-style decoder on bytes.")
    parser.add_argument("--size", choices=SIZES, default="debug")
    parser.add_argument(
        "--data", type=Path, default=sysconfig.get_path("stdlib"), help="directory of text files"
    )
    parser.add_argument("--steps", type=positive_int, default=300)
    parser.add_argument("--batch-size", type=positive_int, help="windows per rank and micro-batch")
    parser.add_argument("--sequence-length", type=positive_int)
    parser.add_argument("--accumulate", type=positive_int, default=1, help="micro-batches per step")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="0: no gradient clipping")
    parser.add_argument("--eval-every", type=positive_int, default=50, help="steps")
    parser.add_argument("--workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("batch_size", "sequence_length", "lr"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(SIZES[args.size], name))
    return args


def main() -> None:
    args = parse_args()
    corpus = read_corpus(args.data)
    if not corpus:
        print(f"train_llama: no readable text file in --data {args.data}", file=sys.stderr)
        sys.exit(2)  # as argparse does
    train(args, corpus)


if __name__ == "__main__":
    main()
