"""The life of one mount: its daemon, the control socket, and the process that outlives the daemon."""
