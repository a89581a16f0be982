"""What Octavo measures of itself and of the machine: ops, engines, steps, and that results do not
depend on circumstances. Only `cli` imports it.
"""
