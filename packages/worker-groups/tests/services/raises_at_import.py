"""An application whose module can't be imported."""

import sys

sys.stdout.write("just before the end\n")
sys.stdout.flush()
raise RuntimeError("no model is here")
