"""Where blocks compute (cpu, accelerator, emulated), and the ranks that share a run."""
