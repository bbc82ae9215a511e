"""What others do, and the paper as published: each a short description, all run by one simulator.

policy.py       the noun
systems.py      lohan, zero-infinity, zero-offload, colossal-ai, flashneuron, g10, ...
activations.py  what to keep and what to recompute: Algorithm 1 and its rivals
memory.py       what it takes, and whether there is room
work.py         the step as a schedule's shape and a clock
run.py          all of it together: `run(policy, model, profile, ...) -> Outcome`
"""
