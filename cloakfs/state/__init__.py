"""What other processes may know of a mount.

What daemons publish, what outlives them, and the client of their control sockets.
"""
