"""Octavo on clusters that others run: as a Ray Serve application."""
