"""Exports cloakfs mounts over NFS, with unmodified servers."""
