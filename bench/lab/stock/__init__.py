"""A laboratory of stock kernels: Debian's, in qemu's software emulation, where instructions are counted.

A count of instructions does not depend on what else runs on the machine, and not on the machine.
"""
