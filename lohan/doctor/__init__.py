"""`lohan doctor`: what this machine has for a run, what is missing, and what to do about it.

Every check tries the real thing where it can and says one sentence. A problem keeps a run from
working here; a warning makes it slow, or less safe.
"""
