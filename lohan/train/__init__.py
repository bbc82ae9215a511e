"""Complete training runs: folder, inputs, loop, tasks, evaluation and logs."""
