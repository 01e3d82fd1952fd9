"""Exporting cloakfs mounts over NFS, by servers as they are."""
