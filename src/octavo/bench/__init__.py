"""What is measured: servers over HTTP (`serve`, `sweep`), one against another (`ab`), and Octavo
from inside: ops, engines, steps, determinism. Only `cli` imports it.
"""
