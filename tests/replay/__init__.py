"""The guard: numbers, plans and schedules of today against recorded ones."""
