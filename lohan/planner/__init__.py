"""From shapes, budgets and a machine to a plan and its forecast."""
