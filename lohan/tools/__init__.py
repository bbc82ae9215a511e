"""What looks at a run or a machine: verify, report, doctor."""
