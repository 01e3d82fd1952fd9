"""How long a machine would take for what was counted in the guest: a model of the processor.

The weights are fitted to CPU times on a machine (Intel Xeon, Linux 6.18): 44 measurements of local work (stat, lookup,
listing, reading and creating files, at home and in public; bare, through bindfs without caches, pyfuse3 alone, and
cloakfs) on the machine, and the same in the guest. As ratios to the bare tree, the model agrees with the machine within
a fifth (one standard deviation; the worst is 1.54 times as much), and the ratio of cloakfs to bindfs is 0.86 of the
machine's (at worst, creating files, 1.58). If all instructions weighed the same, it would be 1.9 times the machine's:
one in the kernel, which bindfs mostly executes, takes twice as long as one of Python.

It does not know caches, a second processor, or waiting for a disk or a network.
"""

from dataclasses import dataclass

USER = 0.145e-9
"""Seconds for an instruction in user mode."""

KERNEL = 0.319e-9
"""Seconds for an instruction in the kernel."""

SWITCH = 1.68e-6
"""Seconds for a switch from one task to another, beside its instructions: what a cold cache costs."""

COPIED = 0.1e-9
"""Seconds for a byte that the kernel copies or clears by a repeated instruction: 10 GB/s, as usual; not fitted."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted during a piece of work.

    Attributes:
        user: instructions in user mode, of all processes: the client's program, daemons.
        kernel: instructions in the kernel, of client and server, without repeated string instructions.
        copied: bytes that the latter have copied or cleared.
        switches: from one task to another.
    """

    user: int
    kernel: int
    copied: int
    switches: int

    def seconds(self) -> float:
        """Return how long it takes by the model."""
        return USER * self.user + KERNEL * self.kernel + COPIED * self.copied + SWITCH * self.switches
