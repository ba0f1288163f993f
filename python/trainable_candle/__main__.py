"""`python -m trainable_candle` is `trainable-candle`."""

import sys

from trainable_candle.cli import main

sys.exit(main())
