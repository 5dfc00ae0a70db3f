"""`mpipipe.train` with the emulated device: python tests/emulated/train.py config.yaml ..."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import emulated_device

if __name__ == "__main__":
    emulated_device.register()
    from mpipipe.train import main

    sys.exit(main(sys.argv[1:]))
