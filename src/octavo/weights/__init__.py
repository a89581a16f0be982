"""Where weights and model metadata come from: a local folder, a GGUF file, the hub, the default.

`open_checkpoint` gives the same kind of object for all of them. No torch here, and importing this
package loads neither numpy nor any file format.
"""

from __future__ import annotations

from octavo.weights.checkpoint import Checkpoint, TensorSpec, TextAssets
from octavo.weights.source import open_checkpoint, open_model

__all__ = ["Checkpoint", "TensorSpec", "TextAssets", "open_checkpoint", "open_model"]
