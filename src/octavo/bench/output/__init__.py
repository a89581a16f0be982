"""What is left of a run: its folder, the screen, pictures, a page, and vLLM's result file."""
