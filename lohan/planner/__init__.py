"""The planner: computes a plan and its forecast from model shapes, budgets and a machine."""
