"""The devices that blocks compute on (CPU, accelerator, emulated), and the ranks of a run."""
