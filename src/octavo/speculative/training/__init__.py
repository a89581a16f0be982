"""Training of draft heads: the target answers prompts, its hidden states over the answers are kept,
and a head learns to foresee them. The one part of Octavo besides `ops/torch` that needs torch.
"""
