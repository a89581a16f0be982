"""What models say of a text, and how far two of them are apart: perplexity and divergence."""
