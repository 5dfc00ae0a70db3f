"""Models of the transformers library, from a folder or a config file on this machine.

    hf:<path> -> build -> HfModel: factory, loss, metrics, initial values, what the data must look like
                                       |                                        |
    checkpoint folder <- export -------'              data set <- adapt --------'

Parameters keep the library's names, so that `from_pretrained` opens what a run has written. Needs
the extra: pip install mpipipe[transformers].
"""

from mpipipe.models.hf.build import HfModel, build, export, vocab_size
from mpipipe.models.hf.data import adapt
from mpipipe.models.hf.forward import Kind

__all__ = ["HfModel", "Kind", "adapt", "build", "export", "vocab_size"]
