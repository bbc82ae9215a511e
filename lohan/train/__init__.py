"""A whole run: its folder, inputs, loop, tasks, evaluation and logs."""
