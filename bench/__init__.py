"""What measures: the commands `cloakfs bench` and `cloakfs prefetch`, installed as `cloakfs_bench`."""
