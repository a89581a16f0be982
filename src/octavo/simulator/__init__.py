"""The engine without a model: what steps cost, and the same scheduler under a clock of its own."""
