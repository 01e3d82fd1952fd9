"""The command `cloakfs`, whose daemons answer with pyfuse3's own session loop.

Usage: python -m bench.stockloop mount SOURCE MOUNTPOINT …
"""

from cli.main import main
from cloakfs.tuning import Tuning

if __name__ == "__main__":
    main(Tuning(stock_loop=True))
