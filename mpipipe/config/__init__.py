"""The configuration: YAML in, one frozen `Config` out, checked once at the border.

sections.py   every key with its type, default and meaning
whole.py      the configuration, and which values do not go together
read.py       from the file to the value, with messages that name the place
"""

from mpipipe.config.read import load, parse, to_yaml
from mpipipe.config.whole import Config

__all__ = ["Config", "load", "parse", "to_yaml"]
