"""Tools that examine a run or a machine: verify, report and doctor."""
