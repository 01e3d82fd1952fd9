"""The command `python -m bench`."""

from cli.output import run

from .nfs.command import nfs
from .prefetch.command import prefetch
from .speed.command import bench

bench.add_command(nfs)
bench.add_command(prefetch)

if __name__ == "__main__":
    run(bench, None, "python -m bench")
