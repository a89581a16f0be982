"""Checkpoint formats that quantize: one file each, all read into one neutral form (`grouped`)."""
