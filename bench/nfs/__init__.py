"""`python -m bench nfs`: work over NFS on stock kernels, in weighed instructions."""
