"""Finds the settings under which a server keeps an SLO at the highest load."""
