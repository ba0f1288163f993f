"""
The compiled part of trainable-candle; import `trainable_candle` instead.
"""

from typing import Final

__all__ = ["__version__", "build_profile"]

__version__: Final[str]
"""
Version of the package.
"""

build_profile: Final[str]
"""
Cargo profile of this build, `"release"` or `"debug"`.
"""
