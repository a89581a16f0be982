"""Models that Octavo has no family for, as transformers' own modules on the torch backend, with
Octavo's attention and paged cache. Its files import torch and transformers; the registry imports
them only when such a model is asked for.
"""
