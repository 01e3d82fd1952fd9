"""The measuring commands `cloakfs bench` and `cloakfs prefetch`, installed as `cloakfs_bench`."""
