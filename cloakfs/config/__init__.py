"""Exports.d: exports(5) with the options of [SZ], parsed into typed values and rendered as text again.

[SZ] is Spadavecchia & Zadok, "Enhancing NFS Cross-Administrative Domain Access", 2002. Pure, except for `files`.
"""
