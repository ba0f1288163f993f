"""`python -m trainable_candle` runs the command `trainable-candle`."""

import sys

from trainable_candle.cli import main

sys.exit(main())
