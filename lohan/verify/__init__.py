"""The same run twice, in memory with plain PyTorch and through LoHan, and what differs."""
