"""What a run can teach: each task is a module, and an entry in `table`."""
