"""Where blocks compute: one seam with three backends (cpu, accelerator, emulated)."""
