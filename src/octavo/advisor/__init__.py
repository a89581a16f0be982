"""Advice from figures: what to serve a model with, and which settings keep a promise."""
