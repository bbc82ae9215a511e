"""LoHan in one file: train a Llama whose training state lives on an SSD.

    python examples/nano_lohan.py MODEL_DIR DATA --steps 4 --out DIR

MODEL_DIR is a Hugging Face folder of a Llama with tokenizer, DATA a text file. DIR gets the
training state (DIR/state) and, at the end, the trained model as a Hugging Face folder
(DIR/model). Start the same command again after a crash, or with more --steps: it goes on after
the last committed step.

Training with AdamW needs 16 bytes for every parameter: weights, gradient and two moments, in
fp32. A model of 7 billion parameters needs 112 GB before its first activation. Three ideas make
do with the memory of one block, whatever the size of the model:

1. One block at a time. The model is cut into blocks (embedding, decoder layers, norm, head). A
   block's weights are read from SSD when its turn comes and dropped afterwards. Forward keeps
   only the input of each block; backward runs the block once more from it (activation
   checkpointing), so that activations, too, exist for one block only.

2. The optimizer runs inside backward. As soon as the gradients of a block are final, its master
   weights and moments are read, updated and written, and the gradients are dropped. Only what
   needs all gradients at once, clipping by their global norm, makes them wait, also on SSD.

3. Two generations on SSD. A step reads generation g and writes generation g + 1 to other files,
   so until the last write the old state is whole. One rename of a small file, the manifest, makes
   the new generation the one that counts: the commit. A crash at any instant loses no more than
   the step in flight, and nothing is ever repaired.

The result is not an approximation: it is what AdamW in memory gives. `lohan` itself trains to the
same bits on the same machine (tests/examples/test_nano.py compares them), and differs in everything
that makes it fast and general:

* Overlap. Here everything happens one after the other, so the SSD rests while the processor
  works. LoHan reads ahead, computes, updates and writes behind at the same time, from a schedule
  that is data: checked, simulated and executed. This file is what that schedule must be equal to.
* Planning. LoHan decides how many bytes of a host budget go to which purpose, which blocks stay
  in memory, and which activations are worth keeping or writing to SSD instead of recomputing
  them.
* Hardware: several drives, direct asynchronous I/O, accelerators, several ranks. State is updated
  in chunks, by a native kernel, so that a block's state need not fit in memory at once.
* Models: any module made of blocks; bf16 and fp16 compute with exact masters; LoRA; other
  optimizers; micro-batches inside a block; dropout, whose random state belongs to a step.

Read it from the bottom: `train` is the architecture; everything above serves one of its lines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

Array = np.ndarray[Any, np.dtype[np.float32]]

ARRAYS = ("weights", "m", "v")  # of a block, in its file
HEAD_TOKENS = 256  # Number of tokens whose logits exist at a time.


# == The model, cut into blocks ====================================================================


@dataclass(frozen=True)
class Block:
    """A module that is read, run and updated as one. The module has code and shapes, no weights."""

    name: str  # in the model: "model.layers.0"
    module: nn.Module
    shapes: Mapping[str, torch.Size]  # of the parameters it owns, by their name in the module

    @property
    def size(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def tensors(self, flat: Array) -> dict[str, torch.Tensor]:
        """Return the parameters as views of one flat array, in which they are contiguous."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            views[name] = torch.from_numpy(flat[start : start + shape.numel()]).view(shape)
            start += shape.numel()
        return views


@dataclass(frozen=True)
class Model:
    """A Llama as a list of blocks: `body` in the order of forward, then the head.

    A tied head owns no weights: it uses those of the embedding.
    """

    config: LlamaConfig
    body: list[Block]
    head: Block
    rotary: nn.Module

    @property
    def blocks(self) -> list[Block]:
        return [*self.body, *([self.head] if self.head.size else [])]

    def run(self, block: Block, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> Any:
        """Run the forward of a block with these weights.

        A decoder layer also needs positions. Without a mask it assumes a causal one.
        """
        around = {}
        if isinstance(block.module, LlamaDecoderLayer):
            positions = torch.arange(x.shape[1]).unsqueeze(0)
            around = {"position_embeddings": self.rotary(x, positions), "position_ids": positions}
        return functional_call(block.module, dict(weights), (x,), around)


def cut(folder: Path) -> Model:
    """Build the model that config.json describes, on the meta device, where it takes no memory."""
    config = LlamaConfig.from_pretrained(folder)
    if config.attention_dropout:
        raise SystemExit("a model with dropout needs LoHan itself: here random state is not kept")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    llama = model.model
    rotary = type(llama.rotary_emb)(config)  # once more, since it has a buffer with real numbers

    def block(name: str) -> Block:
        module = model.get_submodule(name)
        return Block(name, module, {name: p.shape for name, p in module.named_parameters()})

    layers = [f"model.layers.{number}" for number in range(len(llama.layers))]
    body = [block(name) for name in ("model.embed_tokens", *layers, "model.norm")]
    tied = bool(config.tie_word_embeddings)
    head = Block("lm_head", model.lm_head, {}) if tied else block("lm_head")
    return Model(config, body, head, rotary)


def read_checkpoint(folder: Path, blocks: Sequence[Block]) -> Iterator[tuple[Block, Array]]:
    """Yield the weights of each block, one at a time, from the folder's safetensors files."""
    where: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    for block in blocks:
        flat = np.empty(block.size, np.float32)
        for name, view in block.tensors(flat).items():
            full = f"{block.name}.{name}"
            if full not in where:
                raise SystemExit(f"{folder}: no safetensors file has the weight {full}")
            with safe_open(where[full], framework="pt") as tensors:
                view.copy_(tensors.get_tensor(full))
        yield block, flat


# == The state on SSD, in two generations ==========================================================


def sync_folder(folder: Path) -> None:
    """Sync a folder, which makes new and renamed files in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file, which is on the drive and not only in a cache when this returns."""
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


class Store:
    """Master weights and moments of every block, and the manifest that says which step they are of.

    Generation g of a block is the file `BLOCK.a` if g is even and `BLOCK.b` if it is odd: its
    weights, then m, then v, in fp32. The manifest has the committed step, which is the generation
    too, and the checksum of every array, behind a checksum of its own. It is replaced as a whole,
    never changed in place.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self._committed: dict[str, list[int]] = {}  # checksums of weights, m and v, by block
        self._written: dict[str, list[int]] = {}  # those of the next generation, so far

    # -- creating and opening

    @classmethod
    def create(cls, folder: Path, weights: Iterator[tuple[Block, Array]]) -> Store:
        """Create the state of step 0: the weights of the checkpoint, and moments of zero."""
        folder.mkdir(parents=True, exist_ok=True)
        store = cls(folder)
        for block, flat in weights:
            store._put(block, 0, [flat, np.zeros_like(flat), np.zeros_like(flat)])
        store.commit(0)
        return store

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the committed step; what a crash left of the next step is ignored."""
        store = cls(folder)
        checksum, _, content = (folder / "manifest").read_bytes().partition(b"\n")
        if checksum != b"%d" % zlib.crc32(content):
            raise SystemExit(f"{folder / 'manifest'} is damaged: its checksum does not match")
        manifest = json.loads(content)
        store.step, store._committed = manifest["step"], manifest["arrays"]
        return store

    @staticmethod
    def exists(folder: Path) -> bool:
        """Return whether a step was ever committed.

        Without a manifest, the creation of the store was interrupted and has to start
        again.
        """
        return (folder / "manifest").exists()

    # -- one step: read the committed generation, write the next, commit

    def read(self, block: Block, *, moments: bool = False) -> list[Array]:
        """Read the committed weights, and m and v if `moments`, and check their checksums."""
        arrays: list[Array] = []
        path = self._path(block, self.step)
        with open(path, "rb") as file:
            for name, checksum in zip(ARRAYS, self._committed[block.name], strict=True):
                array = np.empty(block.size, np.float32)
                count = file.readinto(array.data.cast("B"))
                if count != array.nbytes or zlib.crc32(array) != checksum:
                    raise SystemExit(f"{path}: {name} of step {self.step} are damaged")
                arrays.append(array)
                if not moments:
                    break
        return arrays

    def write(self, block: Block, arrays: Sequence[Array]) -> None:
        """Write weights, m and v of the next step; the committed step is not touched."""
        self._put(block, self.step + 1, arrays)

    def commit(self, step: int) -> None:
        """Make the new files durable and commit them by renaming the manifest."""
        sync_folder(self.folder)
        content = json.dumps({"step": step, "arrays": self._written}).encode()
        fresh = self.folder / "manifest.tmp"
        write_file(fresh, [b"%d\n" % zlib.crc32(content), content])
        fresh.replace(self.folder / "manifest")
        sync_folder(self.folder)
        self.step, self._committed, self._written = step, self._written, {}

    def _put(self, block: Block, generation: int, arrays: Sequence[Array]) -> None:
        write_file(self._path(block, generation), [array.data.cast("B") for array in arrays])
        self._written[block.name] = [zlib.crc32(array) for array in arrays]

    def _path(self, block: Block, generation: int) -> Path:
        return self.folder / f"{block.name}.{'ab'[generation % 2]}"

    # -- gradients that wait for the others; they are worthless after a crash ----------------------

    def put_gradient(self, block: Block, gradient: Array) -> None:
        gradient.tofile(self.folder / f"{block.name}.grad")

    def get_gradient(self, block: Block) -> Array:
        return np.fromfile(self.folder / f"{block.name}.grad", np.float32)


# == The optimizer, from SSD to SSD ================================================================


@dataclass(frozen=True)
class Settings:
    """The settings of the optimizer.

    `clip` is the largest global norm of the gradients, or 0 for no limit.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0


class AdamW:
    """Takes a block's gradients as soon as they are final, and leaves its next state on SSD."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._waiting: list[Block] = []  # blocks whose gradients are on SSD
        self._squares: list[float] = []

    def take(self, block: Block, grads: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of one block; backward calls this block by block.

        Without clipping this updates the block. With clipping the gradients are stored.
        """
        tensors = [grads[name].contiguous().view(-1).numpy() for name in block.shapes]
        if not self._settings.clip:
            self._update(block, np.concatenate(tensors), scale=1.0)
            return
        self._squares.append(math.fsum(sum_of_squares(tensor) for tensor in tensors))
        self._store.put_gradient(block, np.concatenate(tensors))
        self._waiting.append(block)

    def finish(self) -> None:
        """Apply the stored gradients after backward, when the global norm is known."""
        norm = math.sqrt(math.fsum(self._squares))
        scale = min(1.0, self._settings.clip / (norm + 1e-6))
        for block in self._waiting:
            self._update(block, self._store.get_gradient(block), scale=scale)
        self._waiting, self._squares = [], []

    def _update(self, block: Block, gradient: Array, *, scale: float) -> None:
        weights, m, v = self._store.read(block, moments=True)
        start = 0
        for shape in block.shapes.values():
            part = slice(start, start + shape.numel())
            decay = self._settings.weight_decay if len(shape) >= 2 else 0.0  # matrices only
            adamw(
                weights[part],
                m[part],
                v[part],
                gradient[part],
                scale=scale,
                weight_decay=decay,
                step=self._store.step + 1,
                settings=self._settings,
            )
            start = part.stop
        self._store.write(block, [weights, m, v])


def adamw(
    p: Array,
    m: Array,
    v: Array,
    g: Array,
    *,
    scale: float,
    weight_decay: float,
    step: int,
    settings: Settings,
) -> None:
    """Update one array in place, in fp32.

    Numbers that all elements share are computed in double precision and rounded once. Then each
    operation rounds once, in this order, without fused multiply-add, so that every machine gets
    the same bits. LoHan's native kernel computes the same for many elements at a time.
    """
    lr, (beta1, beta2), f = settings.lr, settings.betas, np.float32
    g = g * f(scale)
    p *= f(1.0 - lr * weight_decay)
    m += (g - m) * f(1.0 - beta1)
    v[:] = f(beta2) * v + (f(1.0 - beta2) * g) * g
    root = np.sqrt(v) * f(1.0 / math.sqrt(1.0 - beta2**step))
    p -= (f(lr / (1.0 - beta1**step)) * m) / (root + f(settings.eps))


def sum_of_squares(x: Array, lanes: int = 8, rows: int = 4096) -> float:
    """Return the sum of squares in double precision, added in a fixed order.

    The order of additions decides the last bits. Each section of 32,768 numbers is added into
    eight sums, which are added at the end: eight, because a processor adds as many at once;
    sections, because threads share them.
    """
    section, total = lanes * rows, 0.0
    for start in range(0, len(x), section):
        part = x[start : start + section].astype(np.float64)
        part = np.pad(part, (0, -len(part) % lanes)).reshape(-1, lanes)
        sums = np.add.accumulate(part * part, axis=0)[-1]
        section_sum = 0.0
        for lane in sums.tolist():
            section_sum += lane
        total += section_sum
    return total


# == One step: forward, head, backward =============================================================


def forward(
    model: Model, store: Store, ids: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the last hidden states and the input of each block, all that backward needs."""
    hidden, inputs = ids, []
    for block in model.body:
        inputs.append(hidden)
        weights = block.tensors(store.read(block)[0])
        with torch.no_grad():
            hidden = model.run(block, weights, hidden)
    return hidden, inputs


def head_and_loss(
    model: Model, store: Store, hidden: torch.Tensor, ids: torch.Tensor
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss of the next tokens and its gradients.

    These are the gradient of `hidden` and those of the head's weights. Full logits, vocabulary
    times tokens, can be larger than anything else. Therefore head and loss run over slices of
    tokens, forward and backward at once, and only gradients remain of a slice.
    """
    owner = model.head if model.head.size else model.body[0]
    weights = leaves(owner.tensors(store.read(owner)[0]))
    x, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    d_x, losses = torch.empty_like(x), []
    for start in range(0, len(x), HEAD_TOKENS):
        part = slice(start, start + HEAD_TOKENS)
        inputs = x[part].detach().requires_grad_()
        logits = model.run(model.head, weights, inputs)
        loss = nn.functional.cross_entropy(logits, targets[part], reduction="sum")
        (loss * (1.0 / len(x))).backward()
        d_x[part] = gradient_of(inputs)
        losses.append(loss.detach())
    d_hidden = torch.zeros_like(hidden)
    d_hidden[:, :-1] = d_x.view(*ids[:, 1:].shape, -1)
    mean = torch.stack(losses).sum() / len(x)
    return mean.item(), d_hidden, {name: gradient_of(leaf) for name, leaf in weights.items()}


def backward(
    model: Model,
    store: Store,
    inputs: list[torch.Tensor],
    d_hidden: torch.Tensor,
    head_grads: dict[str, torch.Tensor],
    optimizer: AdamW,
) -> None:
    """Run backward from the last block to the first, and pass gradients to the optimizer.

    Each block is read, recomputed and differentiated. The gradient of a tied head is not final
    before the embedding, which comes last, has added its own.
    """
    if model.head.size:
        optimizer.take(model.head, head_grads)
    for block in reversed(model.body):
        weights = leaves(block.tensors(store.read(block)[0]))
        x = inputs.pop().detach()
        x.requires_grad_(x.is_floating_point())  # the embedding's input is numbers of tokens
        model.run(block, weights, x).backward(d_hidden)
        grads = {name: gradient_of(leaf) for name, leaf in weights.items()}
        if block is model.body[0] and not model.head.size:
            grads = {name: head_grads[name].add_(grad) for name, grad in grads.items()}
        else:
            d_hidden = gradient_of(x) if x.requires_grad else d_hidden
        optimizer.take(block, grads)


def leaves(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


# == A run =========================================================================================


def train(
    folder: Path,
    batch_of: Callable[[int], torch.Tensor],
    out: Path,
    *,
    steps: int,
    settings: Settings,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train until `steps` steps are committed, and export the model.

    `batch_of` returns the tokens of a step and depends on its number alone, so that a resumed
    run sees the same batches as an uninterrupted one.
    """
    model = cut(folder)
    if Store.exists(out / "state"):
        store = Store.open(out / "state")
    else:
        store = Store.create(out / "state", read_checkpoint(folder, model.blocks))
    optimizer = AdamW(store, settings)

    for step in range(store.step, steps):
        ids = batch_of(step)
        hidden, inputs = forward(model, store, ids)
        loss, d_hidden, head_grads = head_and_loss(model, store, hidden, ids)
        backward(model, store, inputs, d_hidden, head_grads, optimizer)
        optimizer.finish()
        store.commit(step + 1)
        report(step + 1, loss)

    export(model, store, folder, out / "model")


def export(model: Model, store: Store, source: Path, target: Path) -> None:
    """Write a Hugging Face folder, with one block in memory at a time and a file for each."""
    target.mkdir(exist_ok=True)
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    where: dict[str, str] = {}
    for number, block in enumerate(model.blocks, 1):
        name = f"model-{number:05}-of-{len(model.blocks):05}.safetensors"
        tensors = block.tensors(store.read(block)[0])
        named = {f"{block.name}.{inner}": tensor for inner, tensor in tensors.items()}
        save_file(named, target / name, metadata={"format": "pt"})
        where |= dict.fromkeys(named, name)
    total = sum(block.size for block in model.blocks) * 4
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def rows_of(data: Path, folder: Path, seq: int) -> torch.Tensor:
    """Return the text as rows of `seq` tokens."""
    ids = AutoTokenizer.from_pretrained(folder)(data.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < seq:
        raise SystemExit(f"{data} has {len(ids)} tokens; a row takes {seq}: lower --seq")
    return torch.tensor(ids[: len(ids) // seq * seq]).view(-1, seq)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a Llama whose state lives on an SSD.")
    parser.add_argument("model_dir", type=Path, help="Hugging Face folder of a Llama")
    parser.add_argument("data", type=Path, help="text file")
    parser.add_argument("--out", type=Path, required=True, help="for training state and result")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="rows per step")
    parser.add_argument("--seq", type=int, default=64, help="tokens per row")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm, 0: none")
    given = parser.parse_args(words)
    rows = rows_of(given.data, given.model_dir, given.seq)

    def batch_of(step: int) -> torch.Tensor:
        """Return the rows of a step in order, starting again when the text is used up."""
        return rows[torch.arange(step * given.batch, (step + 1) * given.batch) % len(rows)]

    settings = Settings(lr=given.lr, weight_decay=given.weight_decay, clip=given.clip)
    train(
        given.model_dir,
        batch_of,
        given.out,
        steps=given.steps,
        settings=settings,
        report=lambda step, loss: print(f"step {step}: loss {loss:.4f}", flush=True),
    )


if __name__ == "__main__":
    main()
