"""What any package may use: units, the machine's facts, traces, displays, atomic writes."""
