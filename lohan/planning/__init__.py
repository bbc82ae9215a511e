"""From budgets and shapes to a plan and its forecast."""
