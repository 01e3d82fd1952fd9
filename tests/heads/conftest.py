"""Two machines that serve one CephFS: tests that run in a guest, which has it mounted twice."""

from bench.lab.guest import inside

collect_ignore = [] if inside() else ["inguest"]
