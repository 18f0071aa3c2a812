"""`python -m ops.pretrain`."""

import os

# Read when torch is loaded: contended threads sleep instead of spinning, and results do not depend on the thread count.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from ops.pretrain.pretrain import main

if __name__ == "__main__":
    main()
