"""Training data: files are tokenised once, and the batch of any step is a pure function.

    prepare(file) -> RUN/data/{tokens.bin, labels.bin, offsets.npy, meta.json} -> batch(step)

`reading` reads the file, `text` computes tokens and labels, `cache` writes them, and `dataset`
reads them back.
"""

from lohan.data.cache import prepare
from lohan.data.dataset import IGNORE, Dataset, Summary, open_dataset
from lohan.data.text import Encoder, encode_row

__all__ = [
    "IGNORE",
    "Dataset",
    "Encoder",
    "Summary",
    "encode_row",
    "open_dataset",
    "prepare",
]
