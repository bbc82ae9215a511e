"""Helpers that several test modules share. Test modules import from here, not from each other."""

# A process or thread that takes this many seconds hangs. It is no measure of speed: on a machine
# with other work, the imports of a child process may take a minute.
HANG_S = 600
